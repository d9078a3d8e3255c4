// SPDX-License-Identifier: Apache-2.0
// A chat with a language model, streamed; with an image or a video for multimodal models.

import { call } from "./api.js";
import { field, h, number } from "./dom.js";
import { asUrl } from "./files.js";
import { chatCode } from "./snippets.js";

const part = (file, url) => (file.type.startsWith("video/") ? { type: "video_url", video_url: { url } } : { type: "image_url", image_url: { url } });

// A message for the code example, without the data of images and videos.
const shortened = ({ role, content }) => ({ role, content: typeof content === "string" ? content : content.map((each) => (each.type === "text" ? each : { type: each.type, [each.type]: { url: "data:..." } })) });

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const lines = text.split(/\r?\n/);
    text = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

export function chatForm({ name, code, timeline }) {
  const messages = [];
  const talk = h("div", { class: "talk", role: "log", "aria-label": "Conversation", tabindex: "0" });
  const text = h("textarea", { rows: 3 });
  const system = h("input", { autocomplete: "off" });
  const most = h("input", { type: "number", min: "1", max: "100000", value: "128" });
  const heat = h("input", { type: "number", min: "0", max: "2", step: "0.1", value: "0.7" });
  const file = h("input", { type: "file", accept: "image/*,video/*" });
  const button = h("button", { class: "main" }, "Send");
  const stop = h("button", { type: "button", disabled: true, onclick: () => running?.abort() }, "Stop");
  const speed = h("p", { class: "soft", role: "status" });
  let running = null;

  const request = (said) => ({
    model: name,
    messages: [...(system.value ? [{ role: "system", content: system.value }] : []), ...said],
    max_tokens: Number(most.value),
    temperature: Number(heat.value),
  });
  const shown = () => {
    const said = messages.length ? messages : [{ role: "user", content: text.value || "Hello" }];
    code.show(chatCode(request(said.map(shortened))));
  };
  function bubble(role, content) {
    const words = h("span", {}, content);
    talk.append(h("div", { class: `said ${role}` }, h("strong", {}, role === "user" ? "You" : name), words));
    talk.scrollTop = talk.scrollHeight;
    return words;
  }

  async function send(event) {
    event?.preventDefault();
    const question = text.value.trim();
    if (!question || running) return;
    running = new AbortController();
    button.disabled = true;
    stop.disabled = false;
    try {
      const [chosen] = file.files;
      messages.push({ role: "user", content: chosen ? [{ type: "text", text: question }, part(chosen, await asUrl(chosen))] : question });
      bubble("user", chosen ? `${question} [${chosen.name}]` : question);
      text.value = file.value = "";
      shown();
      await answer();
    } catch (error) {
      if (error.name !== "AbortError") {
        messages.pop();
        talk.append(h("p", { class: "failed" }, error.message));
      }
    } finally {
      running = null;
      button.disabled = false;
      stop.disabled = true;
      text.focus();
    }
  }

  async function answer() {
    const id = await timeline.expect();
    const before = performance.now();
    const response = await call("v1/chat/completions", {
      method: "POST",
      headers: id ? { "x-request-id": id } : {},
      body: JSON.stringify({ ...request(messages), stream: true }),
      signal: running.signal,
    });
    const words = bubble("assistant", "");
    let first = 0;
    let pieces = 0;
    let whole = "";
    try {
      for await (const event of events(response)) {
        if (event.error) throw new Error(event.error.message || "the answer ended early");
        const piece = event.choices?.[0]?.delta?.content;
        if (!piece) continue;
        first ||= performance.now();
        pieces += 1;
        whole += piece;
        words.textContent = whole;
        talk.scrollTop = talk.scrollHeight;
      }
    } finally {
      messages.push({ role: "assistant", content: whole });
      timeline.show(id);
    }
    const seconds = (performance.now() - first) / 1000;
    speed.textContent = pieces ? `First token after ${number(first - before)} ms, then ${number((pieces - 1) / Math.max(0.001, seconds))} chunks/s.` : "The answer was empty.";
  }

  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  const form = h(
    "form",
    { class: "card", onsubmit: send },
    talk,
    field("Message (Enter sends, Shift+Enter is a new line)", text),
    h("div", { class: "row" }, field("Image or video, for a multimodal model", file)),
    h("div", { class: "row" }, field("System", system), field("Maximum tokens", most), field("Temperature", heat)),
    h("div", { class: "row" }, button, stop),
    speed,
  );
  form.addEventListener("change", shown);
  shown();
  return { element: form, leave: () => running?.abort() };
}
