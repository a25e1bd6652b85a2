// The page at `/`: a conversation over the server's own API, every token shown by where it came from.
// No framework, no build, nothing loaded from elsewhere.

const $ = (id) => document.getElementById(id);
const POLL_MS = 3000;
const turns = [];
let running = null; // the AbortController of the answer under way
let pace = {}; // tokens/s of the last answers, by "on" and "off"

// -- talking to the server --------------------------------------------------------------------------------------------

function headers() {
  const key = sessionStorage.getItem("key");
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function* events(body, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(), body: JSON.stringify(body), signal,
  });
  if (!response.ok) throw await problem(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the server closed the stream in the middle of an answer");
    const lines = (held + value).split("\n\n");
    held = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function problem(response) {
  if (response.status === 401) $("key-label").hidden = false;
  const text = await response.text();
  try {
    return new Error(JSON.parse(text).error.message);
  } catch {
    return new Error(`the server answered ${response.status}`);
  }
}

// -- one answer -------------------------------------------------------------------------------------------------------

class Answer {
  constructor(place, title) {
    this.turn = turnElement("assistant", title);
    this.text = "";
    this.counts = { hit: 0, draft: 0, recovery: 0 };
    this.first = null;
    this.started = performance.now();
    place.append(this.turn);
  }

  take(choice) {
    const pieces = choice.tokens ?? (choice.delta.content ? [{ text: choice.delta.content, source: "recovery" }] : []);
    const pre = this.turn.querySelector("pre");
    for (const { text, source } of pieces) {
      this.first ??= performance.now();
      this.text += text;
      this.counts[source] += 1;
      const span = document.createElement("span");
      span.className = `tok ${source}`;
      span.textContent = text;
      pre.append(span);
    }
    if (choice.speculation) this.final = choice.speculation;
    this.show();
  }

  get total() { return this.counts.hit + this.counts.draft + this.counts.recovery; }

  get tokensPerSecond() {
    if (this.final) return this.final.decode_tokens_per_s;
    return this.total > 1 ? (this.total - 1) / ((performance.now() - this.first) / 1000) : 0;
  }

  show() {
    const steps = this.final ? this.final.acceptance_length : this.total / Math.max(1, this.counts.recovery);
    const firstMs = this.final ? this.final.ttft_s * 1000 : this.first && this.first - this.started;
    $("acceptance").textContent = this.total ? steps.toFixed(2) : "–";
    $("hit-share").textContent = this.total ? `${Math.round((100 * this.counts.hit) / this.total)} %` : "–";
    $("pace").textContent = this.tokensPerSecond ? this.tokensPerSecond.toFixed(1) : "–";
    $("first").textContent = firstMs ? `${Math.round(firstMs)} ms` : "–";
    const talk = $("talk");
    talk.scrollTop = talk.scrollHeight;
  }
}

function turnElement(role, title) {
  const turn = document.createElement("article");
  turn.className = `turn ${role}`;
  const heading = document.createElement("h2");
  heading.textContent = title;
  turn.append(heading, document.createElement("pre"));
  return turn;
}

async function answer(place, speculation, title) {
  const shown = new Answer(place, title);
  const body = {
    messages: turns, stream: true, return_token_sources: true, speculation,
    temperature: Number($("temperature").value), max_tokens: Number($("max-tokens").value),
  };
  try {
    for await (const event of events(body, running.signal)) {
      if (event.choices.length) shown.take(event.choices[0]);
      showBars(speculation, shown.tokensPerSecond);
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      if (!shown.text) shown.turn.remove();
      throw error;
    }
    shown.turn.querySelector("pre").classList.add("stopped");
  }
  return shown.text;
}

function showBars(speculation, tokensPerSecond) {
  pace[speculation ? "on" : "off"] = tokensPerSecond;
  const most = Math.max(pace.on ?? 0, pace.off ?? 0, 1e-9);
  for (const name of ["on", "off"]) {
    const bar = $(`bar-${name}`);
    bar.querySelector("i").style.width = `${(100 * (pace[name] ?? 0)) / most}%`;
    bar.querySelector("b").textContent = pace[name] ? pace[name].toFixed(1) : "";
  }
  $("bars").hidden = !(pace.on && pace.off); // one alone compares nothing
  $("speedup").textContent = pace.on && pace.off ? `${(pace.on / pace.off).toFixed(2)} times as fast` : "";
}

// -- the conversation -------------------------------------------------------------------------------------------------

async function send() {
  const text = $("text").value.trim();
  if (!text || running) return;
  running = new AbortController();
  $("trouble").hidden = true;
  $("welcome").hidden = true;
  if (!$("key-label").hidden && $("key").value) sessionStorage.setItem("key", $("key").value);
  turns.push({ role: "user", content: text });
  const asked = turnElement("user", "you");
  asked.querySelector("pre").textContent = text;
  $("talk").append(asked);
  $("text").value = "";
  setBusy(true);
  try {
    turns.push({ role: "assistant", content: await converse() });
  } catch (error) {
    $("trouble").textContent = error.message;
    $("trouble").hidden = false;
    $("text").value ||= text;
    turns.pop(); // the question was not answered
    asked.remove();
  } finally {
    running = null;
    setBusy(false);
    $("text").focus();
  }
}

async function converse() {
  const mode = $("mode").value;
  if (mode !== "both") return answer($("talk"), mode === "on", mode === "on" ? "answer" : "answer, without speculation");
  // one after the other, so that neither takes time from the other
  const pair = document.createElement("div");
  pair.className = "turn pair";
  $("talk").append(pair);
  const plain = await answer(pair, false, "without speculation");
  return running.signal.aborted ? plain : answer(pair, true, "with speculation");
}

function setBusy(isBusy) {
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
  $("talk").setAttribute("aria-busy", String(isBusy));
}

function startOver() {
  running?.abort();
  turns.length = 0;
  pace = {};
  $("bars").hidden = true;
  document.querySelectorAll(".turn").forEach((turn) => turn.remove());
  $("welcome").hidden = false;
  $("text").focus();
}

// -- the server's state -----------------------------------------------------------------------------------------------

async function poll() {
  try {
    const health = await (await fetch("health")).json();
    $("model").textContent = health.model;
    $("state").dataset.state = health.status;
    $("state-text").textContent = health.reason ? `${health.status}: ${health.reason}` : health.status;
    if (health.running !== undefined) $("load").textContent = `${health.running}, ${health.waiting}`;
    showMetrics(await (await fetch("metrics")).text());
  } catch {
    $("state").dataset.state = "failed";
    $("state-text").textContent = "the server cannot be reached";
  }
  setTimeout(poll, POLL_MS);
}

function showMetrics(text) {
  const read = (name) => Number(text.match(new RegExp(`^${name} (\\S+)`, "m"))?.[1] ?? 0);
  const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
  $("kv").textContent = `${Math.round(100 * read("ssd_kv_usage_ratio"))} %`;
  $("hits").textContent = share(read("ssd_speculation_cache_hits_total"), read("ssd_speculation_cache_lookups_total"));
  $("kept").textContent = share(read("ssd_accepted_tokens_total"), read("ssd_drafted_tokens_total"));
}

// -- keys and buttons -------------------------------------------------------------------------------------------------

$("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", startOver);
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
$("theme").addEventListener("click", () => {
  const isDark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
});
poll();
