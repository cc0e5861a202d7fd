"use strict";
// The page of Soloist: one conversation, streamed, with what it cost. No dependencies, nothing leaves this machine.

const $ = (id) => document.getElementById(id);
const STORE = "soloist-conversation";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens"];
// What was said: {role, content, reasoning?, failed?}.
let messages = [];
// While an answer streams: what stops it.
let running = null;
// Tokens of each step of the last answer.
let steps = [];

function save() {
  const settings = Object.fromEntries([...NUMBERS, "system"].map((id) => [id, $(id).value]));
  try {
    localStorage.setItem(STORE, JSON.stringify({ messages, settings, thinking: $("thinking").checked }));
  } catch { /* A full or forbidden store loses the reload, nothing else. */ }
}

function restore() {
  try {
    const kept = JSON.parse(localStorage.getItem(STORE)) || {};
    messages = kept.messages || [];
    for (const [id, value] of Object.entries(kept.settings || {})) $(id).value = value;
    $("thinking").checked = kept.thinking !== false;
  } catch { /* As above. */ }
}

function element(tag, attributes, ...children) {
  const node = Object.assign(document.createElement(tag), attributes);
  node.append(...children);
  return node;
}

function button(label, act) {
  return element("button", { type: "button", textContent: label, onclick: act });
}

function show(index) {
  const message = messages[index];
  const who = element("div", { className: "who" }, message.role === "user" ? "You" : message.failed ? "Error" : "Model");
  const said = element("div", { className: "said", textContent: message.content });
  const article = element("article", { className: message.role + (message.failed ? " failed" : "") }, who);
  if (message.role === "user") who.append(button("Edit", () => edit(index)));
  else who.append(button("Regenerate", () => regenerate(index)), button("Copy", () => navigator.clipboard.writeText(message.content)));
  if (message.role === "assistant") {
    const thoughts = element("details", { hidden: !message.reasoning }, element("summary", { textContent: "Reasoning" }),
      element("div", { textContent: message.reasoning || "" }));
    article.append(thoughts);
  }
  article.append(said);
  return article;
}

function showAll() {
  $("messages").replaceChildren(...messages.map((_, index) => show(index)));
  $("messages").scrollTop = $("messages").scrollHeight;
}

function edit(index) {
  if (running) return;
  $("text").value = messages[index].content;
  messages.length = index;
  showAll();
  save();
  $("text").focus();
  grow();
}

function regenerate(index) {
  if (running) return;
  messages.length = index;
  showAll();
  answer();
}

function request() {
  const system = $("system").value.trim();
  const said = messages.filter((m) => !m.failed).map((m) => ({
    role: m.role, content: m.content, ...(m.reasoning ? { reasoning_content: m.reasoning } : {}),
  }));
  const body = { messages: [...(system ? [{ role: "system", content: system }] : []), ...said], stream: true,
    stream_options: { continuous_usage_stats: true } };
  for (const id of NUMBERS) if ($(id).value !== "") body[id] = Number($(id).value);
  if (!$("thinking-row").hidden) body.chat_template_kwargs = { enable_thinking: $("thinking").checked };
  return body;
}

// Give the events of a stream, as they arrive.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith("data: ") && block !== "data: [DONE]") yield JSON.parse(block.slice(6));
    }
  }
}

async function answer() {
  const body = request();
  const message = { role: "assistant", content: "" };
  messages.push(message);
  const article = show(messages.length - 1);
  article.classList.add("running");
  $("messages").append(article);
  const said = article.querySelector(".said");
  const thoughts = article.querySelector("details");
  running = new AbortController();
  setRunning(true);
  steps = [];
  const start = performance.now();
  let first = 0, tokens = 0;
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal: running.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const now = performance.now();
      first = first || now;
      const count = chunk.usage ? chunk.usage.completion_tokens : tokens + 1;
      steps.push(count - tokens);
      tokens = count;
      const delta = chunk.choices.length ? chunk.choices[0].delta : {};
      if (delta.reasoning_content) {
        message.reasoning = (message.reasoning || "") + delta.reasoning_content;
        thoughts.hidden = false;
        thoughts.lastChild.textContent = message.reasoning;
        thoughts.open = !message.content;
      }
      if (delta.content) {
        if (!message.content) thoughts.open = false;
        message.content += delta.content;
        said.textContent = message.content;
      }
      const atEnd = $("messages").scrollHeight - $("messages").scrollTop - $("messages").clientHeight < 80;
      if (atEnd) $("messages").scrollTop = $("messages").scrollHeight;
      if (now > first) $("rate").textContent = ((tokens - steps[0]) / (now - first) * 1000).toFixed(0);
      $("ttft").textContent = `${(first - start).toFixed(0)} ms`;
      draw();
      if (chunk.receipt) settle(chunk);
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      message.failed = true;
      message.content = message.content ? `${message.content}\n\n${error.message}` : error.message;
    }
  }
  running = null;
  setRunning(false);
  if (!message.content && !message.reasoning) messages.pop();
  showAll();
  save();
  refresh();
}

// Put the server's own figures in place of what was measured here.
function settle(chunk) {
  const { receipt, speculation } = chunk;
  if (receipt.decode_tok_per_s) $("rate").textContent = receipt.decode_tok_per_s.toFixed(0);
  if (receipt.ttft_ms) $("ttft").textContent = `${receipt.ttft_ms.toFixed(0)} ms`;
  $("per-step").textContent = speculation.tokens_per_step.toFixed(2);
  $("floor").textContent = receipt.share_of_floor === null ? "–" : `${(100 * receipt.share_of_floor).toFixed(0)} %`;
  $("cached").textContent = `${receipt.cached_tokens} of ${receipt.prompt_tokens}`;
}

// One bar for every step, as high as the tokens it committed.
function draw() {
  const canvas = $("bars"), scale = devicePixelRatio || 1;
  const width = canvas.clientWidth, height = 44, bar = 5;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent");
  const shown = steps.slice(-Math.floor(width / bar));
  const most = Math.max(4, ...shown);
  shown.forEach((count, i) => {
    const high = count / most * (height - 2);
    pen.fillRect(i * bar, height - high, bar - 1, high);
  });
}

function setRunning(isRunning) {
  $("send").hidden = isRunning;
  $("stop").hidden = !isRunning;
  $("state").textContent = isRunning ? "answering" : "idle";
}

function stop() {
  if (!running) return;
  const asked = performance.now();
  running.abort();
  // The server is idle when it says so, not when it was asked.
  const watch = async () => {
    const health = await (await fetch("health")).json();
    if (health.running) return setTimeout(watch, 5);
    $("state").textContent = `idle ${(performance.now() - asked).toFixed(0)} ms after stop`;
    refresh();
  };
  watch().catch(() => {});
}

async function refresh() {
  try {
    const props = await (await fetch("props")).json();
    $("model").textContent = `${props.model.id} · ${props.model.max_model_len} tokens of context · draft: ${props.drafter.name}`;
    $("thinking-row").hidden = !props.template_variables.includes("enable_thinking");
    if (!props.chat_template) $("state").textContent = "this model cannot chat: it has no chat template";
    const open = new Set([...document.querySelectorAll("#requests details[open]")].map((node) => node.dataset.id));
    $("requests").replaceChildren(...props.receipts.slice().reverse().map((receipt) => {
      const rate = receipt.decode_tok_per_s ? `${receipt.decode_tok_per_s.toFixed(0)} tok/s` : "–";
      const list = element("dl", {});
      for (const [name, value] of Object.entries(receipt)) {
        if (value !== null) list.append(element("dt", { textContent: name }), element("dd", { textContent: value }));
      }
      const summary = element("summary", { textContent: `${receipt.completion_tokens} tokens, ${rate}, ${receipt.finish_reason}` });
      const details = element("details", { open: open.has(receipt.id) }, summary, list);
      details.dataset.id = receipt.id;
      return element("li", {}, details);
    }));
  } catch {
    $("state").textContent = "the server does not answer";
  }
}

function grow() {
  $("text").style.height = "auto";
  $("text").style.height = `${$("text").scrollHeight + 2}px`;
}

$("ask").onsubmit = (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  messages = messages.filter((m) => !m.failed);
  messages.push({ role: "user", content: text });
  $("text").value = "";
  grow();
  showAll();
  answer();
};
$("text").oninput = grow;
$("text").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
};
$("stop").onclick = stop;
$("new").onclick = () => {
  stop();
  messages = [];
  showAll();
  save();
  $("text").focus();
};
$("toggle-panel").onclick = () => {
  $("panel").hidden = !$("panel").hidden;
  $("toggle-panel").setAttribute("aria-expanded", String(!$("panel").hidden));
};
addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.altKey && event.key === "n") $("new").click();
  if (event.altKey && event.key === "s") $("toggle-panel").click();
});
$("panel").onchange = save;
addEventListener("resize", draw);

if (innerWidth <= 720) $("toggle-panel").click();
restore();
showAll();
setRunning(false);
refresh();
