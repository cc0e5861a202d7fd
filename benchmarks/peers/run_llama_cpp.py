"""Times greedy decoding with llama.cpp on the same GGUF file: its C decode loop and C sampler, no Python sampling.

Runs in its own environment; prints one JSON line.

Usage: run_llama_cpp.py MODEL.gguf WORK_DIR THREADS RUNS NEW_TOKENS PROMPT
"""

import ctypes
import json
import sys
import time

import llama_cpp


def main() -> None:
    gguf = sys.argv[1]
    num_threads, num_runs, num_new = (int(word) for word in sys.argv[3:6])
    prompt = sys.argv[6].encode()
    if num_runs == 0:
        return
    be_quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(be_quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(gguf.encode(), llama_cpp.llama_model_default_params())
    vocab = llama_cpp.llama_model_get_vocab(model)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = 512
    params.n_threads = params.n_threads_batch = num_threads
    context = llama_cpp.llama_init_from_model(model, params)
    prompt_ids = (llama_cpp.llama_token * 512)()
    num_prompt = llama_cpp.llama_tokenize(vocab, prompt, len(prompt), prompt_ids, 512, True, False)
    sampler = llama_cpp.llama_sampler_init_greedy()
    memory = llama_cpp.llama_get_memory(context)
    next_id = (llama_cpp.llama_token * 1)()
    runs, ids = [], []
    # The first run warms up.
    for run in range(num_runs + 1):
        llama_cpp.llama_memory_clear(memory, True)
        start = time.perf_counter()
        llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(prompt_ids, num_prompt))
        ids = [llama_cpp.llama_sampler_sample(sampler, context, -1)]
        first = time.perf_counter()
        while len(ids) < num_new:
            next_id[0] = ids[-1]
            llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(next_id, 1))
            ids.append(llama_cpp.llama_sampler_sample(sampler, context, -1))
        last = time.perf_counter()
        if run:
            runs.append({"ttft_ms": (first - start) * 1e3, "tpot_ms": (last - first) * 1e3 / (num_new - 1)})
    piece, text = ctypes.create_string_buffer(256), b""
    for token in ids:
        num_bytes = llama_cpp.llama_token_to_piece(vocab, token, piece, len(piece), 0, False)
        text += piece.raw[: max(0, num_bytes)]
    print(
        json.dumps(
            {
                "version": llama_cpp.__version__,
                "num_prompt_tokens": num_prompt,
                "bytes_per_token": llama_cpp.llama_model_size(model),
                "runs": runs,
                "text": text.decode(errors="replace"),
            }
        )
    )


if __name__ == "__main__":
    main()
