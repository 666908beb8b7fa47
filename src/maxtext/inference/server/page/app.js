"use strict";

// ---------------------------------------------------------------- Server, storage, elements

/** What the server says about itself: whether a key is needed, and the defaults of sampling. */
const SERVER = JSON.parse(document.querySelector("meta[name=server]").content);
/** The folder of this page: every address is relative to it. */
const BASE = new URL(location.pathname.replace(/\/?$/, "/"), location.origin);
/** Servers behind one host name, at different prefixes, keep their conversations apart. */
const STORAGE_PREFIX = `maxtext:${BASE.pathname}:`;
const byId = (id) => document.getElementById(id);
const isMac = /Mac|iPhone|iPad/.test(navigator.platform);

/** localStorage or sessionStorage; where the browser forbids them, one that forgets. */
function openStorage(name) {
  try {
    return window[name];
  } catch {
    const values = new Map();
    return {
      getItem: (key) => values.get(key) ?? null,
      setItem: (key, value) => values.set(key, value),
      removeItem: (key) => values.delete(key),
    };
  }
}

const LOCAL = openStorage("localStorage"); // for every tab
const SESSION = openStorage("sessionStorage"); // for this tab, until it is closed

/** A stored value; `fallback` if it is missing or not JSON. */
function load(storage, name, fallback) {
  try {
    return JSON.parse(storage.getItem(STORAGE_PREFIX + name)) ?? fallback;
  } catch {
    return fallback;
  }
}

/** Store a value; undefined removes it. A full or forbidden storage is reported once. */
function store(storage, name, value) {
  try {
    if (value === undefined) storage.removeItem(STORAGE_PREFIX + name);
    else storage.setItem(STORAGE_PREFIX + name, JSON.stringify(value));
  } catch {
    if (!store.hasFailed)
      showToast("The browser's storage is full: export and delete conversations.");
    store.hasFailed = true;
  }
}

/** An element with attributes, listeners (`onclick`) and children; strings become text nodes. */
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  node.append(...children.filter((child) => child != null));
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  return node;
}

/** Paths of icons in a box of 24 by 24. */
const ICONS = {
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6 6 18",
  menu: "M4 7h16M4 12h16M4 17h10",
  settings:
    "M4 8h7M17 8h3M4 16h3M13 16h7M11 8a3 3 0 1 0 6 0 3 3 0 1 0-6 0M7 16a3 3 0 1 0 6 0 3 3 0 1 0-6 0",
  up: "M12 19V5M6 11l6-6 6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 13l4 4L19 7",
  pencil: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  again: "M20 11a8 8 0 1 0-2.3 6.3M20 4v7h-7",
  next: "M5 5l7 7-7 7M13 5l7 7-7 7",
  trash: "M4 7h16M9 7V4h6v3M6 7l1 13h10l1-13",
  import: "M12 4v11M7 10l5 5 5-5M4 20h16",
  export: "M12 15V4M7 9l5-5 5 5M4 20h16",
  tool: "M14.5 6.5a4 4 0 0 1 5-1l-2.6 2.6 1.5 1.5L21 7a4 4 0 0 1-5.5 5L8 19.500a2 2 0 0 1-3-3l7.500-7.500a4 4 0 0 1 2-2.500z",
  warning: "M12 4 2.500 20h19zM12 10v5M12 17.500v.1",
};

function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS(svg.namespaceURI, name === "stop" ? "rect" : "path");
  const shape = name === "stop" ? { x: 6, y: 6, width: 12, height: 12, rx: 2 } : { d: ICONS[name] };
  for (const [key, value] of Object.entries(shape)) path.setAttribute(key, value);
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.append(path);
  return svg;
}

/** The mark of the assistant, as in the sidebar. */
const logo = () => document.querySelector(".brand svg").cloneNode(true);

/** A small button with an icon and a text, which is also its name. */
function smallButton(name, text, onclick) {
  return element("button", { type: "button", class: "small-button", onclick }, icon(name), text);
}

/** A line at the bottom for some seconds, with an optional action. */
function showToast(text, action, onaction) {
  const toast = element("div", { class: "toast" }, text);
  if (action) {
    const onclick = () => {
      toast.remove();
      onaction();
    };
    toast.append(element("button", { type: "button", onclick }, action));
  }
  byId("toasts").replaceChildren(toast);
  setTimeout(() => toast.remove(), action ? 10000 : 4000);
}

/** Copy a text, and show so in the button. Pages without TLS have no navigator.clipboard. */
async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = element("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  announce("Copied.");
  if (button.dataset.isCopied) return;
  const former = [...button.childNodes];
  button.dataset.isCopied = "true";
  button.replaceChildren(icon("check"), "Copied");
  setTimeout(() => {
    button.replaceChildren(...former);
    delete button.dataset.isCopied;
  }, 1500);
}

// ---------------------------------------------------------------- Screen readers

const ANNOUNCE_EVERY = 1500; // milliseconds between announcements of a streamed text
let heldText = ""; // that has not been told yet
let announceTimer = 0;

/** Tell a sentence to screen readers; the region keeps the last few. */
function announce(text) {
  const live = byId("live");
  live.append(element("p", {}, text));
  while (live.childElementCount > 6) live.firstChild.remove();
}

/** Tell a text as it is streamed, in whole sentences. `isLast` also tells the rest. */
function announceDelta(text, isLast = false) {
  heldText += text;
  if (isLast) {
    clearTimeout(announceTimer);
    announceHeld(heldText.length);
  } else {
    announceTimer ||= setTimeout(() => announceHeld(lastSentenceEnd(heldText)), ANNOUNCE_EVERY);
  }
}

function announceHeld(end) {
  announceTimer = 0;
  const sentences = heldText
    .slice(0, end)
    .replace(/[`*_#|]+/g, "")
    .trim();
  heldText = heldText.slice(end);
  if (sentences) announce(sentences);
}

const lastSentenceEnd = (text) =>
  Math.max(...[".", "!", "?", "\n", "。"].map((sign) => text.lastIndexOf(sign))) + 1;

// ---------------------------------------------------------------- API

/** An answer of the server that is not 200, or an error event of a stream. */
class ApiError extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter; // seconds, or null
  }
}

/** The key of this tab: it is not kept in files. */
const keyStore = {
  get: () => load(SESSION, "key", ""),
  set: (key) => store(SESSION, "key", key || undefined),
};

/** Call the API. Throws ApiError for a status other than 200, TypeError without a connection. */
async function callApi(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (keyStore.get()) headers.Authorization = `Bearer ${keyStore.get()}`;
  const response = await fetch(new URL(path, BASE), {
    ...options,
    headers,
    credentials: "same-origin",
  });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const retryAfter = parseInt(response.headers.get("Retry-After"), 10);
  const message = body?.error?.message ?? `The server answered with status ${response.status}.`;
  throw new ApiError(response.status, message, Number.isNaN(retryAfter) ? null : retryAfter);
}

/** The JSON objects of a stream of events. Throws if it ends without [DONE]. */
async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError(0, "The connection ended before the answer was complete.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

/** Fill the list of models; a server that needs a key is asked once there is one. */
async function loadModels() {
  if (SERVER.needs_key && !keyStore.get()) return;
  try {
    const { data } = await (await callApi("v1/models")).json();
    models = data;
  } catch (error) {
    if (error.status === 401) askForKey();
  }
  showModels();
}

// ---------------------------------------------------------------- Settings

/** Fields of requests. Without a value the server's default applies. */
const FIELDS = [
  {
    name: "conversationSystem",
    label: "System prompt of this conversation",
    kind: "text",
    placeholder: "As in all conversations",
  },
  {
    name: "system",
    label: "System prompt of all conversations",
    kind: "text",
    placeholder: "How the model should answer",
  },
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, fallback: 1 },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05, fallback: 1 },
  { name: "top_k", label: "Top k", min: -1, step: 1, fallback: "all" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, fallback: 0 },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, fallback: "as many as fit" },
  { name: "seed", label: "Seed", step: 1, fallback: "random" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, fallback: 0 },
  {
    name: "frequency_penalty",
    label: "Frequency penalty",
    min: -2,
    max: 2,
    step: 0.1,
    fallback: 0,
  },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, step: 0.05, fallback: 1 },
  {
    name: "thinking",
    label: "Thinking",
    kind: "choice",
    choices: { "": "Default", on: "On", off: "Off" },
  },
  { name: "stop", label: "Stop strings, one a line", kind: "text", placeholder: "None" },
];
let settings = load(LOCAL, "settings", {});

/** The input element of a field. */
function drawField(field) {
  const attributes = {
    class: "field",
    name: field.name,
    dir: field.kind === "text" ? "auto" : null,
  };
  if (field.kind === "text")
    return element("textarea", { ...attributes, rows: 2, placeholder: field.placeholder });
  if (field.kind === "choice") {
    const options = Object.entries(field.choices).map(([value, text]) =>
      element("option", { value }, text),
    );
    return element("select", attributes, ...options);
  }
  const value = SERVER.defaults[field.name] ?? field.fallback;
  return element("input", {
    ...attributes,
    type: "number",
    inputmode: "decimal",
    min: field.min,
    max: field.max,
    step: field.step === 1 ? 1 : "any",
    placeholder: typeof value === "number" ? `${value} (default)` : value,
  });
}

function buildSettings() {
  const labels = FIELDS.map((field) =>
    element(
      "label",
      { class: field.kind === "text" ? "wide" : null },
      field.label,
      drawField(field),
    ),
  );
  byId("fields").replaceChildren(
    ...labels,
    element(
      "p",
      {},
      "Empty fields take the server's default. Settings hold for every conversation of this browser, except for the first one.",
    ),
  );
  byId("fields").addEventListener("input", ({ target }) => {
    if (!target.validity.valid) return;
    if (target.name === "conversationSystem") return setConversationSystem(target.value);
    settings = { ...settings, [target.name]: target.value };
    if (!target.value) delete settings[target.name];
    store(LOCAL, "settings", settings);
  });
}

function openSettings() {
  for (const input of byId("fields").querySelectorAll("[name]"))
    input.value = settings[input.name] ?? "";
  byId("fields").querySelector("[name=conversationSystem]").value = current?.system ?? draftSystem;
  byId("forget-key").hidden = !keyStore.get();
  if (byId("settings").open) return;
  byId("settings").showModal();
  byId("fields").querySelector("[name]").focus();
}

let draftSystem = ""; // the system prompt of a conversation that has not begun

function setConversationSystem(text) {
  if (!current) {
    draftSystem = text;
    return;
  }
  current.system = text;
  saveConversation(current);
}

/** The fields of a request that the settings give. */
function requestFields() {
  const fields = {};
  for (const { name, kind } of FIELDS)
    if (!kind && settings[name]) fields[name] = Number(settings[name]);
  const stop = (settings.stop ?? "").split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop;
  if (settings.thinking)
    fields.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  return fields;
}

let models = [];

/** The name of the model that requests ask for; undefined: the server's only one. */
const currentModel = () =>
  models.some(({ id }) => id === settings.model) ? settings.model : models[0]?.id;

function showModels() {
  const options = models.map(({ id }) => element("option", { value: id }, id));
  const select = byId("model");
  if (options.length) select.replaceChildren(...options);
  select.disabled = options.length < 2;
  if (options.length) select.value = currentModel();
}

// ---------------------------------------------------------------- Conversations

/** By id: {id, title, updated, system, messages}. A message is {role, content} and for the assistant also
 *  {reasoning, reasoningSeconds, toolCalls, state, error, finishReason, stats, model}. */
const conversations = new Map();
let current = null; // the conversation that is shown; null: a new one without messages

/** Read every conversation of this browser. An answer that was cut off by a reload is broken. */
function loadConversations() {
  for (const key of Object.keys(LOCAL)) {
    if (!key.startsWith(`${STORAGE_PREFIX}chat:`)) continue;
    const conversation = checkConversation(load(LOCAL, key.slice(STORAGE_PREFIX.length), null));
    if (conversation && !generations.has(conversation.id))
      conversations.set(conversation.id, conversation);
  }
}

/** A conversation from storage or a file, with known fields of the right types; else null. */
function checkConversation(value) {
  if (typeof value?.id !== "string" || !Array.isArray(value.messages)) return null;
  const text = (item) => (typeof item === "string" ? item : "");
  const messages = value.messages
    .filter((each) => ["user", "assistant"].includes(each?.role))
    .map((each) => {
      if (each.role === "user") return { role: "user", content: text(each.content) };
      const calls = (Array.isArray(each.toolCalls) ? each.toolCalls : []).map((call) => ({
        id: text(call?.id),
        name: text(call?.name),
        arguments: text(call?.arguments),
      }));
      const isCut = each.state === "streaming";
      return {
        role: "assistant",
        content: text(each.content),
        reasoning: text(each.reasoning),
        reasoningSeconds: Number(each.reasoningSeconds) || 0,
        toolCalls: calls,
        state: isCut ? "broken" : text(each.state),
        finishReason: text(each.finishReason),
        error: isCut ? "The page was closed before the answer was complete." : text(each.error),
        stats: text(each.stats),
        model: text(each.model),
      };
    });
  return {
    id: value.id,
    title: text(value.title) || "Untitled",
    updated: Number(value.updated) || 0,
    system: text(value.system),
    messages,
  };
}

function saveConversation(conversation) {
  if (conversations.has(conversation.id)) store(LOCAL, `chat:${conversation.id}`, conversation);
}

/** An id; crypto.randomUUID needs TLS. */
const newId = () =>
  [...crypto.getRandomValues(new Uint8Array(12))]
    .map((byte) => byte.toString(16).padStart(2, "0"))
    .join("");

function createConversation(text) {
  const title = text.trim().split("\n")[0].slice(0, 80);
  const conversation = {
    id: newId(),
    title: title || "Untitled",
    updated: Date.now(),
    system: draftSystem,
    messages: [],
  };
  draftSystem = "";
  conversations.set(conversation.id, conversation);
  return conversation;
}

function deleteConversation(conversation) {
  generations.get(conversation.id)?.stop();
  conversations.delete(conversation.id);
  store(LOCAL, `chat:${conversation.id}`, undefined);
  if (current === conversation) openConversation(null);
  showConversations();
  const restore = () => {
    conversations.set(conversation.id, conversation);
    saveConversation(conversation);
    openConversation(conversation);
  };
  showToast("The conversation is deleted.", "Undo", restore);
}

/** Save conversations as a JSON file. */
function exportConversations(list) {
  if (!list.length) return showToast("There is nothing to export.");
  const content = { format: "maxtext-conversations", version: 1, conversations: list };
  const address = URL.createObjectURL(
    new Blob([JSON.stringify(content, null, 2)], { type: "application/json" }),
  );
  const date = new Date().toISOString().slice(0, 10);
  element("a", { href: address, download: `conversations-${date}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

/** Add the conversations of an exported file; those with an id that exists get a new one. */
async function importConversations(file) {
  let list = null;
  try {
    list = JSON.parse(await file.text()).conversations.map(checkConversation);
  } catch {
    // Shown below.
  }
  if (!list?.length || list.includes(null))
    return showToast("This file has no exported conversations.");
  for (const conversation of list) {
    if (conversations.has(conversation.id)) conversation.id = newId();
    conversations.set(conversation.id, conversation);
    saveConversation(conversation);
  }
  openConversation(list[0]);
  showToast(
    list.length === 1
      ? "1 conversation is imported."
      : `${list.length} conversations are imported.`,
  );
}

/** The heading under which the list shows a conversation. */
function ageOf(conversation) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  const days = Math.ceil((midnight - conversation.updated) / 86400000);
  return days <= 0 ? "Today" : days === 1 ? "Yesterday" : days <= 7 ? "Last seven days" : "Older";
}

function showConversations() {
  const nav = byId("conversations");
  const sorted = [...conversations.values()].sort((a, b) => b.updated - a.updated);
  const groups = Map.groupBy ? Map.groupBy(sorted, ageOf) : new Map([["Conversations", sorted]]);
  nav.replaceChildren(
    ...[...groups].flatMap(([age, list]) =>
      list.length ? [element("h2", {}, age), element("ul", {}, ...list.map(drawConversation))] : [],
    ),
  );
}

function drawConversation(conversation) {
  const isCurrent = conversation === current;
  const tool = (name, label, onclick) =>
    element(
      "button",
      { type: "button", class: "icon-button", "aria-label": label, title: label, onclick },
      icon(name),
    );
  const item = element(
    "li",
    { class: isCurrent ? "current" : null },
    element(
      "button",
      {
        type: "button",
        dir: "auto",
        title: conversation.title,
        "aria-current": isCurrent ? "page" : null,
        class: generations.has(conversation.id) ? "conversation running" : "conversation",
        onclick: () => {
          openConversation(conversation);
          toggleSidebar(false);
        },
      },
      conversation.title,
    ),
    element(
      "div",
      { class: "tools" },
      tool("pencil", "Rename", () => renameConversation(conversation, item)),
      tool("export", "Export", () => exportConversations([conversation])),
      tool("trash", "Delete", () => deleteConversation(conversation)),
    ),
  );
  return item;
}

/** Replace an item of the list by a field with its title. */
function renameConversation(conversation, item) {
  const input = element("input", {
    class: "rename",
    "aria-label": "Title",
    maxlength: 120,
    dir: "auto",
  });
  input.value = conversation.title;
  let isDone = false;
  const finish = (isKept) => {
    if (isDone) return;
    isDone = true;
    if (isKept && input.value.trim()) conversation.title = input.value.trim();
    saveConversation(conversation);
    showConversations();
    showTitle();
  };
  input.addEventListener("blur", () => finish(true));
  input.addEventListener("keydown", (event) => {
    if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    finish(event.key === "Enter");
    byId("conversations").querySelector(".current .conversation")?.focus();
  });
  item.replaceChildren(input);
  input.focus();
  input.select();
}

function showTitle() {
  byId("title").textContent = current?.title ?? "New chat";
  document.title = current ? `${current.title} · MaxText chat` : "MaxText chat";
}

/** Show a conversation; null: a new one. */
function openConversation(conversation) {
  current = conversation;
  store(SESSION, "current", conversation?.id);
  views.clear();
  byId("messages").replaceChildren(...(conversation?.messages ?? []).map(drawMessage));
  byId("messages").hidden = !conversation;
  byId("welcome").hidden = Boolean(conversation);
  showTitle();
  showConversations();
  showButtons();
  if (conversation) scrollToEnd();
  else byId("scroll").scrollTop = 0;
}

function newConversation() {
  draftSystem = "";
  openConversation(null);
  toggleSidebar(false);
  byId("message").focus();
}

// ---------------------------------------------------------------- Generation

const generations = new Map(); // by the id of the conversation
const MAX_RETRIES = 20; // of a busy server
const MAX_RETRY_SECONDS = 60;
const SAVE_EVERY = 1000; // milliseconds, while an answer is streamed
const MIN_STOP = 600; // milliseconds that Stop is shown, so that it does not only flash

/** One request to the server, which fills the last message of a conversation: a new one, or
 *  `continued`, an answer that was cut off.
 */
class Generation {
  constructor(conversation, continued = null) {
    this.conversation = conversation;
    this.controller = new AbortController();
    this.isContinued = Boolean(continued);
    this.message = continued ?? {
      role: "assistant",
      content: "",
      reasoning: "",
      reasoningSeconds: 0,
      toolCalls: [],
      state: "streaming",
      error: "",
      finishReason: "",
      stats: "",
      model: currentModel() ?? "",
    };
    Object.assign(this.message, { state: "streaming", error: "", finishReason: "" });
    this.usage = null;
    this.savedTime = 0;
    this.drawDelay = 0; // milliseconds to the next drawing
    this.drawTimer = 0;
    this.waiting = ""; // a sentence while a busy server is asked again
    this.compiling = ""; // what the server compiles while nothing comes
  }

  stop() {
    this.controller.abort();
  }

  /** Ask until the answer is complete, broken or stopped. */
  async run() {
    const { conversation, message } = this;
    const messages = apiMessages(conversation);
    if (this.isContinued) messages.at(-1).reasoning_content = message.reasoning || undefined;
    else conversation.messages.push(message);
    conversation.updated = Date.now();
    generations.set(conversation.id, this);
    saveConversation(conversation);
    if (current === conversation) {
      stopTime = performance.now() + MIN_STOP;
      setTimeout(showButtons, MIN_STOP + 1);
      openConversation(conversation);
    }
    announce("The model is answering.");
    this.firstStart = performance.now();
    const clock = setInterval(() => this.onSecond(), 1000);
    try {
      await this.askWithRetries(messages);
      message.state = "done";
    } catch (error) {
      this.fail(error);
    }
    clearInterval(clock);
    this.finish();
  }

  async askWithRetries(messages) {
    for (let attempt = 0; ; attempt++) {
      try {
        return await this.ask(messages);
      } catch (error) {
        const isBusy = error.status === 429 || error.status === 503;
        if (!isBusy || attempt >= MAX_RETRIES) throw error;
        await this.countDown(error.retryAfter ?? 2 ** attempt);
      }
    }
  }

  /** While nothing comes, count the seconds, and ask the server whether it compiles a program. */
  async onSecond() {
    if (!this.firstTime) this.show();
    const isQuiet = performance.now() - (this.lastTime ?? this.firstStart) > 1500;
    const state = isQuiet && !this.waiting ? await serverState() : null;
    const text = compilingText(state?.compiling);
    if (text === this.compiling || this.message.state !== "streaming") return;
    this.compiling = text;
    if (text) announce(text);
    this.show();
  }

  /** Wait before a further attempt, and show how long. */
  async countDown(seconds) {
    const wait = Math.min(Math.max(seconds, 1), MAX_RETRY_SECONDS);
    announce(`The server is busy. Trying again in ${wait} seconds.`);
    for (let left = wait; left > 0; left--) {
      this.waiting = `The server is busy. Trying again in ${left} s …`;
      this.show();
      await this.sleep(1000);
    }
    this.waiting = "";
    this.show();
  }

  sleep(milliseconds) {
    const { signal } = this.controller;
    return new Promise((resolve, reject) => {
      const timer = setTimeout(resolve, milliseconds);
      const onabort = () => {
        clearTimeout(timer);
        reject(signal.reason);
      };
      signal.addEventListener("abort", onabort, { once: true });
    });
  }

  async ask(messages) {
    const body = {
      ...requestFields(),
      model: this.message.model || undefined,
      messages,
      ...(this.isContinued && { continue_final_message: true, add_generation_prompt: false }),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    this.start = performance.now();
    const response = await callApi("v1/chat/completions", {
      method: "POST",
      body: JSON.stringify(body),
      signal: this.controller.signal,
    });
    hideKeyForm();
    if (!models.length) loadModels();
    for await (const event of readEvents(response)) {
      if (event.error)
        throw new ApiError(0, event.error.message ?? "The server reported an error.");
      this.addEvent(event);
    }
  }

  addEvent(event) {
    const { message } = this;
    if (event.usage) this.usage = event.usage;
    const [choice] = event.choices ?? [];
    if (!choice) return;
    const { content, reasoning_content, reasoning, tool_calls } = choice.delta ?? {};
    const thought = reasoning_content || reasoning || "";
    if (content || thought || tool_calls) this.firstTime ??= performance.now();
    message.reasoning += thought;
    if (thought) message.reasoningSeconds = (performance.now() - this.firstTime) / 1000;
    if (content) {
      message.content += content;
      announceDelta(content);
    }
    for (const call of tool_calls ?? []) this.addCall(call);
    if (choice.finish_reason) message.finishReason = choice.finish_reason;
    this.lastTime = performance.now();
    this.show();
    if (this.lastTime - this.savedTime > SAVE_EVERY) {
      this.savedTime = this.lastTime;
      saveConversation(this.conversation);
    }
  }

  addCall({ index = 0, id, function: part }) {
    const call = (this.message.toolCalls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name += part?.name ?? "";
    call.arguments += part?.arguments ?? "";
  }

  /** What the user sees after an error. The text so far stays. */
  fail(error) {
    const { message } = this;
    if (this.controller.signal.aborted) message.state = "stopped";
    else if (error.status === 401) {
      message.state = "error";
      message.error = "The server needs an API key.";
      askForKey(this.conversation);
    } else {
      const hasText = message.content || message.reasoning;
      message.state = hasText ? "broken" : "error";
      if (error instanceof ApiError) message.error = error.message;
      else if (hasText) message.error = "The connection was lost before the answer was complete.";
      else message.error = "The server cannot be reached.";
      if (error.status === 404) loadModels(); // it may serve other models now
    }
  }

  finish() {
    const { conversation, message } = this;
    message.toolCalls = message.toolCalls.filter(Boolean);
    message.stats = this.describe();
    if (generations.get(conversation.id) === this) generations.delete(conversation.id);
    saveConversation(conversation);
    announceDelta("", true);
    announce(
      message.error || (message.state === "stopped" ? "Stopped." : "The answer is complete."),
    );
    this.show();
    showConversations();
    if (current === conversation) showButtons();
  }

  /** Time to the first token, speed and counts; without tokens "". */
  describe() {
    if (!this.firstTime) return "";
    const parts = [`first token ${((this.firstTime - this.start) / 1000).toFixed(2)} s`];
    const tokens = this.usage?.completion_tokens;
    if (tokens) {
      // Tokens come in blocks: the time of a short answer is measured from the request on.
      const isShort = this.lastTime - this.firstTime < 200;
      const milliseconds = this.lastTime - (isShort ? this.start : this.firstTime);
      parts.push(`${((1000 * tokens) / Math.max(milliseconds, 1)).toFixed(1)} tokens/s`);
      parts.push(
        `${tokens.toLocaleString()} tokens`,
        `${this.usage.prompt_tokens.toLocaleString()} in the prompt`,
      );
    }
    return parts.join(" · ");
  }

  /** Draw the message soon: in the next frame, or later if drawing takes long. */
  show() {
    if (this.drawTimer) return;
    const draw = () => {
      this.drawTimer = 0;
      const begin = performance.now();
      const seconds = this.firstTime ? 0 : (performance.now() - this.firstStart) / 1000;
      views.get(this.message)?.update(this.waiting, Math.floor(seconds), this.compiling);
      if (current === this.conversation) followEnd();
      this.drawDelay = Math.min(5 * (performance.now() - begin), 1000);
    };
    // A hidden page has no frames.
    const drawInFrame = () => (document.hidden ? draw() : requestAnimationFrame(draw));
    this.drawTimer = setTimeout(drawInFrame, this.drawDelay);
  }
}

/** What the server does, as /health has it; null if it cannot be asked. */
async function serverState() {
  try {
    return await (await callApi("health")).json();
  } catch {
    return null;
  }
}

/** A sentence about a program that the server compiles. */
function compilingText(compiling) {
  if (!compiling) return "";
  const number = compiling.num_compiled + 1;
  return `The server is compiling program ${number} (${compiling.program}). Later answers do not wait for it.`;
}

/** The messages of a request: the system prompt, and no empty answers. Texts of the user that
 *  would follow each other become one, since many chat templates want roles to alternate. */
function apiMessages({ system, messages }) {
  const content = system || settings.system;
  const result = content ? [{ role: "system", content }] : [];
  for (const { role, content, toolCalls } of messages) {
    const last = result.at(-1);
    if (role === "assistant" && !content && !toolCalls?.length) continue;
    if (role === "user" && last?.role === "user") last.content += `\n\n${content}`;
    else if (toolCalls?.length)
      result.push({
        role,
        content: content || null,
        tool_calls: toolCalls.map(({ id, ...call }) => ({ id, type: "function", function: call })),
      });
    else result.push({ role, content });
  }
  return result;
}

/** Send what is in the text box. */
function send() {
  const text = byId("message").value.trim();
  if (!text || (current && generations.has(current.id))) return;
  if (!useTypedKey() && SERVER.needs_key && !keyStore.get()) {
    askForKey();
    return;
  }
  const conversation = current ?? createConversation(text);
  conversation.messages.push({ role: "user", content: text });
  setDraft("");
  current = conversation;
  isFollowing = true;
  new Generation(conversation).run();
  focusMessage();
}

/** Whether an answer was cut off by the limit of tokens, by Stop or by an error. */
const isCutOff = ({ content, toolCalls, state, finishReason }) =>
  content &&
  !toolCalls.length &&
  (finishReason === "length" || state === "stopped" || state === "broken");

/** Go on with an answer that was cut off. */
function continueAnswer(conversation) {
  const last = conversation.messages.at(-1);
  if (generations.has(conversation.id) || !isCutOff(last)) return;
  useTypedKey();
  isFollowing = true;
  new Generation(conversation, last).run();
  focusMessage();
}

/** Answer the last message of the user again. */
function regenerate(conversation) {
  if (generations.has(conversation.id)) return;
  useTypedKey();
  while (conversation.messages.at(-1)?.role === "assistant") conversation.messages.pop();
  if (!conversation.messages.length) return;
  isFollowing = true;
  new Generation(conversation).run();
  focusMessage();
}

// ---------------------------------------------------------------- Messages

const views = new Map(); // from a message of the open conversation to its view

function drawMessage(message) {
  const view = message.role === "user" ? new UserView(message) : new AssistantView(message);
  views.set(message, view);
  return view.node;
}

class UserView {
  constructor(message) {
    this.message = message;
    this.node = element("article", { "data-role": "user", "aria-label": "You" });
    this.show();
  }

  show() {
    const { message } = this;
    const copy = smallButton("copy", "Copy", () => copyText(message.content, copy));
    this.editButton = smallButton("pencil", "Edit", () => this.edit());
    this.node.replaceChildren(
      element("div", { class: "text", dir: "auto" }, message.content),
      element("div", { class: "actions" }, copy, this.editButton),
    );
  }

  /** Edit the text in its place. Sending it drops what follows. */
  edit() {
    const area = element("textarea", { "aria-label": "New text", dir: "auto" });
    area.value = this.message.content;
    const cancel = () => {
      this.show();
      this.editButton.focus();
    };
    const submit = () => {
      if (area.value.trim()) this.resend(area.value.trim());
    };
    area.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Escape") {
        event.stopPropagation();
        cancel();
      } else if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        submit();
      }
    });
    this.node.replaceChildren(
      element(
        "div",
        { class: "edit" },
        area,
        element(
          "div",
          {},
          element("button", { type: "button", class: "button", onclick: cancel }, "Cancel"),
          element(
            "button",
            { type: "button", class: "button primary", onclick: submit },
            "Save and send",
          ),
        ),
      ),
    );
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  resend(text) {
    const conversation = current;
    generations.get(conversation.id)?.stop();
    generations.delete(conversation.id);
    const { messages } = conversation;
    messages.splice(messages.indexOf(this.message), messages.length, {
      role: "user",
      content: text,
    });
    isFollowing = true;
    new Generation(conversation).run();
    focusMessage();
  }
}

class AssistantView {
  constructor(message) {
    this.message = message;
    this.markdown = new MarkdownView();
    this.reasoning = element(
      "details",
      { class: "reasoning", hidden: true },
      element("summary"),
      element("div", { dir: "auto" }),
    );
    this.calls = element("div");
    this.notes = element("div");
    this.actions = element("div", { class: "actions" });
    this.node = element(
      "article",
      { "data-role": "assistant", "aria-label": "Model" },
      element("div", { class: "who" }, logo(), message.model || "Model"),
      this.reasoning,
      this.markdown.node,
      this.calls,
      this.notes,
      this.actions,
    );
    this.update();
  }

  /** Show what has changed since the last call. `waiting` is a sentence in place of an answer,
   *  `seconds` the time that nothing has come, `compiling` a sentence about why.
   */
  update(waiting = "", seconds = 0, compiling = "") {
    const { message } = this;
    const isStreaming = message.state === "streaming";
    this.node.setAttribute("aria-busy", isStreaming);
    if (message.content !== this.content) this.markdown.update((this.content = message.content));
    this.updateReasoning(isStreaming && !message.content);
    this.updateCalls();
    this.updateNotes(isStreaming, waiting, seconds, compiling);
    if (this.state !== message.state)
      this.actions.replaceChildren(...(isStreaming ? [] : this.buttons()));
    this.state = message.state;
  }

  updateReasoning(isThinking) {
    const { reasoning, reasoningSeconds } = this.message;
    const [summary, text] = this.reasoning.children;
    this.reasoning.hidden = !reasoning;
    summary.textContent = isThinking
      ? "Thinking …"
      : reasoningSeconds >= 1
        ? `Thought for ${Math.round(reasoningSeconds)} s`
        : "Thoughts";
    if (text.textContent.length !== reasoning.length) text.textContent = reasoning;
  }

  /** Tool calls as blocks, with their arguments indented where they are JSON. */
  updateCalls() {
    const blocks = this.message.toolCalls.filter(Boolean).map((call) => {
      let text = call.arguments;
      try {
        text = JSON.stringify(JSON.parse(text), null, 2);
      } catch {
        // Not complete yet.
      }
      const header = element("div", {}, icon("tool"), element("span", {}, `Call of ${call.name}`));
      return element(
        "div",
        { class: "code" },
        header,
        element(
          "pre",
          { tabindex: "0", role: "group", "aria-label": "Arguments" },
          element("code", {}, highlight(text, "json")),
        ),
      );
    });
    this.calls.replaceChildren(...blocks);
  }

  updateNotes(isStreaming, waiting, seconds, compiling) {
    const { content, reasoning, state, error, finishReason, toolCalls } = this.message;
    const notes = [];
    const note = (text, kind = "") =>
      notes.push(
        element("div", { class: `note ${kind}`, dir: "auto" }, kind ? icon("warning") : null, text),
      );
    if (waiting) note(waiting);
    else if (isStreaming && ((!content && !toolCalls.length) || seconds || compiling)) {
      notes.push(
        element(
          "div",
          {
            class: "typing",
            role: "img",
            "aria-label": reasoning ? "The model is thinking" : "Waiting for the model",
          },
          element("i"),
          element("i"),
          element("i"),
        ),
      );
      if (seconds) notes.push(element("span", { class: "stats" }, `${seconds} s`));
      if (compiling) notes.push(element("div", { class: "stats" }, compiling));
    }
    if (state === "stopped" && !content) note("Stopped before the answer began.");
    if (state === "broken") note(`${error} The text so far is kept.`, "danger");
    if (state === "error") note(error, "danger");
    if (finishReason === "length") note("The answer was cut at the limit of tokens.");
    if (state === "done" && !content && !reasoning && !toolCalls.length)
      note("The model answered with an empty text.");
    const texts = notes.map((node) => node.textContent + node.className).join();
    if (texts !== this.noteTexts) this.notes.replaceChildren(...notes);
    this.noteTexts = texts;
  }

  buttons() {
    const { message } = this;
    const result = [];
    if (message.stats) result.push(element("span", { class: "stats" }, message.stats));
    if (message.content) {
      const copy = smallButton("copy", "Copy", () => copyText(message.content, copy));
      result.push(copy);
    }
    const isLast = current?.messages.at(-1) === message;
    if (isLast && isCutOff(message))
      result.push(smallButton("next", "Continue", () => continueAnswer(current)));
    if (isLast) result.push(smallButton("again", "Regenerate", () => regenerate(current)));
    return result;
  }
}

// ---------------------------------------------------------------- Key

let unanswered = null; // the conversation that is answered when there is a key

/** Ask for a key above the text box, and then answer `conversation`, if there is one. */
function askForKey(conversation = null) {
  unanswered = conversation ?? unanswered;
  const isRefused = Boolean(keyStore.get());
  keyStore.set("");
  if (byId("key")) {
    byId("key-input").focus();
    return;
  }
  const input = element("input", {
    id: "key-input",
    class: "field",
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
    pattern: "[!-~]+",
    title: "letters, digits and signs without blanks",
  });
  const text = isRefused
    ? "The server does not accept this key."
    : "This server needs an API key. It is kept until this tab is closed.";
  const form = element(
    "form",
    { id: "key", onsubmit: onKeySubmit },
    element("p", { class: isRefused ? "danger" : null }, text),
    element("label", {}, "API key", input),
    element("button", { class: "button primary", type: "submit" }, "Use this key"),
  );
  byId("composer").before(form);
  announce(text);
  input.focus();
}

function onKeySubmit(event) {
  event.preventDefault();
  if (!useTypedKey()) return;
  hideKeyForm();
  byId("message").focus();
  if (unanswered && unanswered === current) regenerate(unanswered);
  else loadModels();
  unanswered = null;
}

/** Take the key from its field, if it is shown; returns whether there was one. */
function useTypedKey() {
  const input = byId("key-input");
  if (!input?.reportValidity()) return false;
  keyStore.set(input.value);
  return true;
}

const hideKeyForm = () => byId("key")?.remove();

// ---------------------------------------------------------------- Text box, scrolling, sidebar

/** Set the text of the text box, as if it was typed. */
function setDraft(text) {
  byId("message").value = text;
  updateComposer();
}

/** The height follows the text; the text survives a reload. */
function updateComposer() {
  const area = byId("message");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
  area.style.overflowY = area.scrollHeight > area.clientHeight + 2 ? "auto" : "hidden";
  store(SESSION, "draft", area.value || undefined);
  byId("send").disabled = !area.value.trim();
}

let stopTime = 0; // until which Stop is shown, also after the end of an answer

/** Send, or Stop while the open conversation is answered. */
function showButtons() {
  const wasQuick = current?.messages.at(-1)?.state === "done" && performance.now() < stopTime;
  const hasStop = generations.has(current?.id) || wasQuick;
  byId("send").hidden = hasStop;
  byId("stop").hidden = !hasStop;
}

/** Go to the text box; on a touch screen that would open the keyboard. */
function focusMessage() {
  if (matchMedia("(hover: hover)").matches) byId("message").focus();
}

let isFollowing = true; // whether the end of the conversation stays in sight

function scrollToEnd() {
  isFollowing = true;
  byId("scroll").scrollTop = byId("scroll").scrollHeight;
  byId("latest").hidden = true;
}

function followEnd() {
  if (isFollowing) byId("scroll").scrollTop = byId("scroll").scrollHeight;
  else byId("latest").hidden = false;
}

function onScroll() {
  const { scrollTop, scrollHeight, clientHeight } = byId("scroll");
  isFollowing = scrollHeight - scrollTop - clientHeight < 60;
  byId("latest").hidden = isFollowing || !current;
}

/** Open or close the list of conversations in a narrow window. */
function toggleSidebar(isOpen) {
  const wasOpen = document.body.classList.contains("open");
  document.body.classList.toggle("open", isOpen);
  document.querySelector("main").inert = isOpen;
  byId("menu").setAttribute("aria-expanded", isOpen);
  if (isOpen) byId("new").focus();
  else if (wasOpen) byId("menu").focus();
}

// ---------------------------------------------------------------- Keyboard and start

function onKey(event) {
  const isCommand = (event.ctrlKey || event.metaKey) && !event.altKey && !event.shiftKey;
  const isTyping = event.target.closest?.("input, textarea, select, dialog");
  if (isCommand && event.key.toLowerCase() === "k") newConversation();
  else if (isCommand && event.key === ",") openSettings();
  else if (event.key === "/" && !isTyping && !isCommand) byId("message").focus();
  else {
    if (event.key === "Escape" && !event.isComposing && !byId("settings").open) onEscape();
    return;
  }
  event.preventDefault();
}

function onEscape() {
  if (document.body.classList.contains("open")) toggleSidebar(false);
  else stopCurrent();
}

function stopCurrent() {
  generations.get(current?.id)?.stop();
  stopTime = 0;
  showButtons();
  focusMessage();
}

function resetSettings() {
  settings = { model: settings.model };
  store(LOCAL, "settings", settings);
  openSettings();
}

function forgetKey() {
  byId("settings").close();
  keyStore.set("");
  askForKey();
}

/** Icons of the buttons in the document, and what a click does. */
const BUTTONS = {
  new: ["plus", newConversation],
  "new-top": ["plus", newConversation],
  menu: ["menu", () => toggleSidebar(true)],
  close: ["close", () => toggleSidebar(false)],
  import: ["import", () => byId("file").click()],
  export: ["export", () => exportConversations([...conversations.values()])],
  "open-settings": ["settings", openSettings],
  "close-settings": ["close", () => byId("settings").close()],
  latest: ["down", scrollToEnd],
  send: ["up", null], // submits its form
  stop: ["stop", stopCurrent],
};

/** Connect the elements of the document. */
function connect() {
  const listen = (id, event, listener) => byId(id).addEventListener(event, listener);
  for (const [id, [name, onclick]] of Object.entries(BUTTONS)) {
    byId(id).prepend(icon(name));
    if (onclick) listen(id, "click", onclick);
  }
  if (isMac) byId("new").querySelector("kbd").textContent = "⌘ K";
  listen("scrim", "click", () => toggleSidebar(false));
  listen("reset", "click", resetSettings);
  listen("forget-key", "click", forgetKey);
  listen("file", "change", onFile);
  listen("model", "change", ({ target }) => {
    settings = { ...settings, model: target.value };
    store(LOCAL, "settings", settings);
  });
  listen("composer", "submit", (event) => {
    event.preventDefault();
    send();
  });
  listen("message", "input", updateComposer);
  listen("message", "keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  byId("scroll").addEventListener("scroll", onScroll, { passive: true });
  matchMedia("(max-width: 50rem)").addEventListener("change", () => toggleSidebar(false));
  document.addEventListener("keydown", onKey);
  addEventListener("storage", onStorage);
  addEventListener("pagehide", () => {
    for (const { conversation } of generations.values()) saveConversation(conversation);
  });
}

async function onFile({ target }) {
  if (target.files[0]) await importConversations(target.files[0]);
  target.value = "";
}

/** Another tab has changed the conversations. */
function onStorage({ key }) {
  if (!key?.startsWith(`${STORAGE_PREFIX}chat:`)) return;
  const id = key.slice(`${STORAGE_PREFIX}chat:`.length);
  if (generations.has(id)) return;
  const value = load(LOCAL, `chat:${id}`, null);
  if (value?.messages?.at(-1)?.state === "streaming") return; // the other tab shows it
  const conversation = checkConversation(value);
  if (conversation) conversations.set(id, conversation);
  else conversations.delete(id);
  if (current?.id === id) openConversation(conversation);
  else showConversations();
}

const SUGGESTIONS = [
  "Explain how attention works, with a small example",
  "Write a Python function that merges two sorted lists",
  "Compare three ways to store time series in a table",
  "Help me plan a quiet weekend in the mountains",
];

function start() {
  connect();
  buildSettings();
  for (const text of SUGGESTIONS) {
    const onclick = () => {
      setDraft(text);
      byId("message").focus();
    };
    byId("suggestions").append(element("button", { type: "button", onclick }, text));
  }
  loadConversations();
  openConversation(conversations.get(load(SESSION, "current", "")) ?? null);
  setDraft(load(SESSION, "draft", ""));
  if (SERVER.needs_key && !keyStore.get()) askForKey();
  else focusMessage();
  loadModels();
}

start();
