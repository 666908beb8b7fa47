"use strict";

/* Markdown and highlighted code as elements. Uses `element`, `smallButton` and `copyText` of app.js. */

// ---------------------------------------------------------------- Highlighting of code

const END = String.raw`(?![\s\S])`; // of the text; $ is the end of a line
const C_COMMENT = String.raw`\/\/.*|\/\*[\s\S]*?(?:\*\/|${END})`;
const HASH_COMMENT = String.raw`#.*`;
const QUOTED = String.raw`"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?`;
const TEMPLATE = "`(?:\\\\.|[^`\\\\])*`?";
const TRIPLE = String.raw`"""[\s\S]*?(?:"""|${END})|'''[\s\S]*?(?:'''|${END})`;
const PYTHON_STRING = `[rRbBfFuU]{0,2}(?:${TRIPLE}|${QUOTED})`;
const C_WORDS = `break case const continue default do else enum for goto if return static struct
  switch typedef union void volatile while`;
const C_TYPES = "bool char double float int long short signed unsigned size_t auto";

/** Languages: comment and string as regular expressions, keywords and literals as words. */
const LANGUAGES = {
  python: {
    comment: HASH_COMMENT,
    string: PYTHON_STRING,
    keywords: `
      and as assert async await break case class continue def del elif else except finally
      for from global if import in is lambda match nonlocal not or pass raise return try
      while with yield`,
    literals: "True False None self cls",
  },
  javascript: {
    comment: C_COMMENT,
    string: `${QUOTED}|${TEMPLATE}`,
    keywords: `
      as async await break case catch class const continue default delete do else enum
      export extends finally for from function get if implements import in instanceof
      interface let new of private protected public readonly return set static super switch
      throw try type typeof var void while with yield`,
    literals: "true false null undefined this NaN Infinity",
  },
  c: {
    comment: C_COMMENT,
    string: QUOTED,
    name: String.raw`^[ \t]*#\w+`,
    keywords: `
      ${C_WORDS} ${C_TYPES} alignas catch class concept constexpr consteval delete explicit
      extern friend inline mutable namespace new noexcept operator override private
      protected public requires template this throw try typename using virtual`,
    literals: "true false nullptr NULL",
  },
  java: {
    comment: C_COMMENT,
    string: `${TRIPLE}|${QUOTED}`,
    name: String.raw`@\w+`,
    keywords: `
      ${C_WORDS} abstract boolean byte catch char class double extends final finally float
      fun implements import in instanceof int interface internal is let long native new
      object open override package private protected public record sealed short super
      synchronized this throw throws transient try val var when yield func guard namespace
      using async await`,
    literals: "true false null nil it",
  },
  rust: {
    comment: C_COMMENT,
    string: String.raw`b?"(?:\\[\s\S]|[^"\\])*"?|'(?:\\.|[^'\\\n])'`,
    name: String.raw`#!?\[[^\]\n]*\]|\b\w+!`,
    keywords: `
      as async await break const continue crate dyn else enum extern fn for if impl in let
      loop match mod move mut pub ref return static struct super trait type union unsafe use
      where while`,
    literals: "true false self Self None Some Ok Err",
  },
  go: {
    comment: C_COMMENT,
    string: `${QUOTED}|${TEMPLATE}`,
    keywords: `
      break case chan const continue default defer else fallthrough for func go goto if
      import interface map package range return select struct switch type var string int
      int64 float64 bool byte error rune any`,
    literals: "true false nil iota",
  },
  bash: {
    comment: String.raw`(?<![\w$&{])#.*`,
    string: String.raw`"(?:\\[\s\S]|[^"\\])*"?|'[^']*'?`,
    name: String.raw`\$(?:\w+|\{[^}\n]*\}?|[@#?*!$-])|(?<=\s)--?[a-zA-Z][\w-]*`,
    keywords: `
      if then else elif fi for in do done while until case esac function return export local
      source set unset alias echo cd sudo exit trap read`,
    literals: "true false",
  },
  sql: {
    comment: String.raw`--.*|\/\*[\s\S]*?(?:\*\/|${END})`,
    string: String.raw`'(?:''|[^'])*'?`,
    ignoreCase: true,
    keywords: `
      add all alter and as asc begin between by case check column commit constraint create
      cross default delete desc distinct drop else end exists foreign from full group having
      if in index inner insert into is join key left like limit not null offset on or order
      outer over partition primary references returning right rollback select set table then
      union unique update using values view when where window with`,
    literals: "true false null",
  },
  json: {
    comment: C_COMMENT,
    string: String.raw`"(?:\\.|[^"\\\n])*"?(?!\s*:)`,
    name: String.raw`"(?:\\.|[^"\\\n])*"(?=\s*:)`,
    keywords: "",
    literals: "true false null",
  },
  yaml: {
    comment: String.raw`(?:^|(?<=\s))#.*`,
    string: QUOTED,
    name: String.raw`^[ \t-]*[\w.\/-]+(?=:(?:\s|$))|^[ \t]*\[[^\]\n]*\]|[&*]\w+`,
    keywords: "",
    literals: "true false null yes no on off",
  },
  css: {
    comment: String.raw`\/\*[\s\S]*?(?:\*\/|${END})`,
    string: QUOTED,
    name: String.raw`[\w-]+(?=:\s)`,
    number: String.raw`#[0-9a-fA-F]{3,8}\b|-?\b\d+(?:\.\d+)?(?:%|[a-z]+)?`,
    keywords: "important media supports import keyframes from to",
    literals: "",
  },
  html: {
    comment: String.raw`<!--[\s\S]*?(?:-->|${END})|<!\w[^>]*>`,
    string: String.raw`(?<==)\s*(?:${QUOTED})`,
    type: String.raw`<\/?[a-zA-Z][\w:.-]*|\/?>`,
    name: String.raw`(?<=\s)[@:a-zA-Z][\w:.-]*(?==)`,
    keywords: "",
    literals: "",
  },
  ruby: {
    comment: HASH_COMMENT,
    string: QUOTED,
    name: String.raw`:\w+|@{1,2}\w+`,
    keywords: `
      alias and begin break case class def do else elsif end ensure for function if in local
      module next not or redo rescue repeat require retry return self super then undef
      unless until when while yield`,
    literals: "true false nil",
  },
  diff: {
    string: String.raw`^\+.*`,
    name: String.raw`^-.*`,
    keyword: String.raw`^@@.*`,
    comment: String.raw`^(?:diff|index|---|\+\+\+).*`,
    keywords: "",
    literals: "",
  },
};
const ALIASES = {
  py: "python",
  python3: "python",
  pycon: "python",
  js: "javascript",
  jsx: "javascript",
  ts: "javascript",
  tsx: "javascript",
  typescript: "javascript",
  mjs: "javascript",
  h: "c",
  cpp: "c",
  "c++": "c",
  cc: "c",
  cuda: "c",
  hpp: "c",
  csharp: "java",
  cs: "java",
  "c#": "java",
  kotlin: "java",
  kt: "java",
  swift: "java",
  scala: "java",
  dart: "java",
  rs: "rust",
  golang: "go",
  sh: "bash",
  shell: "bash",
  zsh: "bash",
  console: "bash",
  dockerfile: "bash",
  makefile: "bash",
  postgresql: "sql",
  mysql: "sql",
  sqlite: "sql",
  json5: "json",
  jsonl: "json",
  jsonc: "json",
  yml: "yaml",
  toml: "yaml",
  ini: "yaml",
  scss: "css",
  less: "css",
  xml: "html",
  svg: "html",
  vue: "html",
  rb: "ruby",
  lua: "ruby",
  patch: "diff",
};
const MAX_HIGHLIGHTED = 50000; // characters

/** The compiled rules of a language, or null for an unknown one. */
function languageRules(name) {
  const language = LANGUAGES[ALIASES[name] ?? name];
  if (!language || !Object.hasOwn(LANGUAGES, ALIASES[name] ?? name)) return null;
  if (!language.pattern) {
    const never = "(?!)";
    const number =
      language.number ??
      String.raw`\b(?:0[xob][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)[a-zA-Z]?\w?\w?\b`;
    const groups = [
      `(?<comment>${language.comment ?? never})`,
      `(?<name>${language.name ?? never})`,
      `(?<string>${language.string ?? never})`,
      `(?<type>${language.type ?? never})`,
      `(?<keyword>${language.keyword ?? never})`,
      `(?<number>${number})`,
      String.raw`(?<word>[\p{L}_$][\p{L}\d_$]*)`,
    ];
    language.pattern = new RegExp(groups.join("|"), "gmu");
    language.words = new Map([
      ...language.keywords
        .trim()
        .split(/\s+/)
        .map((word) => [word, "keyword"]),
      ...language.literals.split(" ").map((word) => [word, "literal"]),
    ]);
  }
  return language;
}

/** The kind of a word: keyword, literal, function, type, or "" for others. */
function wordKind(language, word, next) {
  const kind = language.words.get(language.ignoreCase ? word.toLowerCase() : word);
  if (kind) return kind;
  if (next === "(") return "function";
  return /^\p{Lu}\p{L}*\p{Ll}/u.test(word) && language !== LANGUAGES.html ? "type" : "";
}

/** Code as spans and text nodes. */
function highlight(code, name) {
  const language = code.length > MAX_HIGHLIGHTED ? null : languageRules(name);
  const result = document.createDocumentFragment();
  if (!language) {
    result.append(code);
    return result;
  }
  let end = 0;
  for (const match of code.matchAll(language.pattern)) {
    const text = match[0];
    let kind = Object.keys(match.groups).find((group) => match.groups[group] !== undefined);
    if (kind === "word") kind = wordKind(language, text, code[match.index + text.length]);
    if (!kind || !text) continue;
    result.append(code.slice(end, match.index), element("span", { class: `token-${kind}` }, text));
    end = match.index + text.length;
  }
  result.append(code.slice(end));
  return result;
}

// ---------------------------------------------------------------- Markdown

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=\s|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}>/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +(.*))?$/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const SETEXT = /^ {0,3}(?:={2,}|-{2,})[ \t]*$/;
const MAX_DEPTH = 8; // of quotes, lists and emphasis in each other
const SAFE_PROTOCOLS = new Set(["http:", "https:", "mailto:"]);

/** Whether a line begins a block other than a paragraph. */
function beginsBlock(line) {
  return (
    HEADING.test(line) ||
    FENCE.test(line) ||
    QUOTE.test(line) ||
    RULE.test(line) ||
    /^ {0,3}(?:[-*+]|1[.)]) +\S/.test(line)
  );
}

const isTable = (lines, index) =>
  lines[index].includes("|") &&
  index + 1 < lines.length &&
  lines[index + 1].includes("-") &&
  TABLE_RULE.test(lines[index + 1]) &&
  tableCells(lines[index]).length === tableCells(lines[index + 1]).length;

/** The blocks of some lines: {kind, start, end, …}, where start and end are numbers of lines. */
function parseBlocks(lines, depth = 0) {
  const blocks = [];
  for (let index = 0; index < lines.length;) {
    if (!lines[index].trim()) {
      index++;
      continue;
    }
    const block = { start: index, ...parseBlock(lines, index, depth) };
    blocks.push(block);
    index = block.end;
  }
  return blocks;
}

function parseBlock(lines, index, depth) {
  const line = lines[index];
  if (FENCE.test(line)) return parseFence(lines, index);
  if (HEADING.test(line)) {
    const level = HEADING.exec(line)[1].length;
    const text = line
      .trim()
      .slice(level)
      .trim()
      .replace(/(?:^|[ \t])#+$/, "");
    return { kind: "heading", level, text, end: index + 1 };
  }
  if (RULE.test(line)) return { kind: "rule", end: index + 1 };
  if (QUOTE.test(line) && depth < MAX_DEPTH) return parseQuote(lines, index, depth);
  if (ITEM.test(line) && depth < MAX_DEPTH) return parseList(lines, index, depth);
  if (isTable(lines, index)) return parseTable(lines, index);
  return parseParagraph(lines, index);
}

/** A fenced block of code; without its closing fence it goes to the end. */
function parseFence(lines, index) {
  const [, fence, info] = FENCE.exec(lines[index]);
  const indent = lines[index].search(/\S/);
  let end = index + 1;
  const isClosing = (line) =>
    line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  while (end < lines.length && !isClosing(lines[end])) end++;
  const code = lines
    .slice(index + 1, end)
    .map((line) => line.slice(Math.min(indent, line.search(/\S|$/))));
  return {
    kind: "code",
    language: info.trim().split(/\s/)[0],
    text: code.join("\n"),
    end: Math.min(end + 1, lines.length),
  };
}

function parseQuote(lines, index, depth) {
  let end = index;
  while (
    end < lines.length &&
    (QUOTE.test(lines[end]) || (lines[end].trim() && !beginsBlock(lines[end])))
  )
    end++;
  const inner = lines.slice(index, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  return { kind: "quote", blocks: parseBlocks(inner, depth + 1), end };
}

/** A list; lines that are indented by two or more belong to the item before them. */
function parseList(lines, index, depth) {
  const first = ITEM.exec(lines[index]);
  const isOrdered = (match) => /\d/.test(match[2]);
  const indent = first[1].length;
  const items = [];
  let end = index;
  for (let match = first; match; match = end < lines.length ? ITEM.exec(lines[end]) : null) {
    const isSibling = match[1].length < indent + 2 && match[1].length >= Math.min(indent, 3);
    if (!isSibling || isOrdered(match) !== isOrdered(first) || RULE.test(lines[end])) break;
    const item = [match[3] ?? ""];
    const width = match[1].length + match[2].length + 1;
    end = collectItem(lines, end + 1, indent + 2, width, item);
    items.push(parseBlocks(item, depth + 1));
  }
  return { kind: "list", ordered: isOrdered(first), first: parseInt(first[2], 10), items, end };
}

/** Append the further lines of an item to `item`; returns the line after them. */
function collectItem(lines, index, minIndent, width, item) {
  let isAfterBlank = false;
  for (; index < lines.length; index++) {
    const line = lines[index];
    const indent = line.search(/\S/);
    if (indent < 0) isAfterBlank = true;
    else if (indent < minIndent && (isAfterBlank || beginsBlock(line) || ITEM.test(line))) break;
    else isAfterBlank = false;
    item.push(indent < 0 ? "" : line.slice(Math.min(indent, width)));
  }
  return index;
}

/** The cells of a row: parts between | that are not escaped or in code. */
function tableCells(line) {
  const cells = [""];
  let isCode = false;
  const text = line
    .trim()
    .replace(/^\|/, "")
    .replace(/([^\\])\|$/, "$1");
  for (let index = 0; index < text.length; index++) {
    if (text[index] === "\\" && text[index + 1] === "|") cells[cells.length - 1] += text[++index];
    else if (text[index] === "|" && !isCode) cells.push("");
    else {
      if (text[index] === "`") isCode = !isCode;
      cells[cells.length - 1] += text[index];
    }
  }
  return cells.map((cell) => cell.trim());
}

function parseTable(lines, index) {
  const sides = tableCells(lines[index + 1]).map((cell) =>
    cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : "",
  );
  let end = index + 2;
  while (end < lines.length && lines[end].includes("|") && !beginsBlock(lines[end])) end++;
  const rows = lines.slice(index + 2, end).map((line) => tableCells(line).slice(0, sides.length));
  return { kind: "table", sides, head: tableCells(lines[index]), rows, end };
}

/** Lines up to a blank one or another block; underlined with = or - it is a heading. */
function parseParagraph(lines, index) {
  let end = index + 1;
  for (; end < lines.length && lines[end].trim(); end++) {
    if (SETEXT.test(lines[end])) {
      const text = lines.slice(index, end).join("\n").trim();
      return { kind: "heading", level: lines[end].includes("=") ? 1 : 2, text, end: end + 1 };
    }
    if (beginsBlock(lines[end]) || isTable(lines, end)) break;
  }
  return {
    kind: "paragraph",
    text: lines
      .slice(index, end)
      .map((line) => line.trimStart())
      .join("\n"),
    end,
  };
}

/** A block as an element. The outermost elements have a direction of their own, right to left if
 *  their first letter is; those inside take it over. */
function drawBlock(block, isInside = false) {
  const attributes = { dir: isInside ? null : "auto" };
  const inline = (tag, text) => element(tag, attributes, drawInline(text));
  const inside = (blocks) => blocks.map((each) => drawBlock(each, true));
  switch (block.kind) {
    case "code":
      return drawCode(block.text, block.language);
    case "heading":
      return inline(`h${block.level}`, block.text);
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", attributes, ...inside(block.blocks));
    case "list": {
      const start = block.ordered && block.first !== 1 ? block.first : null;
      return element(
        block.ordered ? "ol" : "ul",
        { ...attributes, start },
        ...block.items.map(drawItem),
      );
    }
    case "table":
      return drawTable(block);
    default:
      return inline("p", block.text);
  }
}

/** An item of a list; [ ] and [x] at its beginning are check boxes. */
function drawItem(blocks) {
  const inside = (list) => list.map((each) => drawBlock(each, true));
  const task = blocks[0]?.kind === "paragraph" && /^\[([ xX])\] /.exec(blocks[0].text);
  if (!task) return element("li", {}, ...inside(blocks));
  const text = `${task[1] === " " ? "☐" : "☑"} ${blocks[0].text.slice(4)}`;
  return element("li", { class: "task" }, ...inside([{ ...blocks[0], text }, ...blocks.slice(1)]));
}

function drawTable({ sides, head, rows }) {
  const cell = (tag, text, side) => element(tag, { class: side || null }, drawInline(text));
  const row = (tag, cells) =>
    element("tr", {}, ...sides.map((side, column) => cell(tag, cells[column] ?? "", side)));
  const table = element(
    "table",
    {},
    element("thead", {}, row("th", head)),
    element("tbody", {}, ...rows.map((cells) => row("td", cells))),
  );
  return element(
    "div",
    { class: "table", dir: "auto", tabindex: "0", role: "group", "aria-label": "Table" },
    table,
  );
}

/** A block of code with its language and a button that copies it. */
function drawCode(text, language) {
  const button = smallButton("copy", "Copy code", () => copyText(text, button));
  const code = element("code", {}, highlight(text, language.toLowerCase()));
  return element(
    "div",
    { class: "code" },
    element("div", {}, element("span", {}, language || "text"), button),
    element("pre", { tabindex: "0", role: "group", "aria-label": "Code" }, code),
  );
}

const INLINE = new RegExp(
  [
    String.raw`(?<math>\\\(|\\\[|\$\$)`,
    String.raw`\\(?<escaped>[!-\/:-@[-\x60{-~])`,
    "(?<ticks>`+)",
    String.raw`(?<mark>\*{1,3}|_{1,3}|~~)`,
    String.raw`(?<bracket>!?\[)`,
    String.raw`(?<address>https?:\/\/[^\s<>\x60*|]+)`,
    String.raw`<(?<angled>(?:https?:|mailto:)[^\s<>]+)>`,
    String.raw`(?<break><br\s?\/?>|(?: {2,}|\\)?\n)`,
  ].join("|"),
  "g",
);
const MATH_ENDS = { "\\(": "\\)", "\\[": "\\]", $$: "$$" };
const MAX_LABEL = 1000; // characters of a link's text and of its address

/** The inline elements of a text. */
function drawInline(text, depth = 0) {
  const result = document.createDocumentFragment();
  const missing = new Set(); // closing signs that do not occur any more
  const pattern = new RegExp(INLINE);
  let end = 0;
  for (let match; (match = pattern.exec(text));) {
    const part = drawPart(text, match, missing, depth);
    if (!part) continue;
    result.append(text.slice(end, match.index), part.node);
    end = pattern.lastIndex = part.end;
  }
  result.append(text.slice(end));
  return result;
}

/** {node, end} of what begins at a match of INLINE; null if it is plain text. */
function drawPart(text, match, missing, depth) {
  const { math, escaped, ticks, mark, bracket, address, angled } = match.groups;
  const start = match.index + match[0].length;
  if (escaped) return { node: document.createTextNode(escaped), end: start };
  if (match.groups.break) return { node: element("br"), end: start };
  if (math)
    return drawUntil(text, start, MATH_ENDS[math], missing, (inner) =>
      element("code", {}, inner.trim()),
    );
  if (ticks)
    return drawUntil(text, start, ticks, missing, (inner) =>
      element("code", {}, inner.replace(/\n/g, " ").replace(/^ (.*\S.*) $/, "$1")),
    );
  if (angled) return { node: drawLink(angled, angled.replace("mailto:", "")), end: start };
  if (address) {
    const shown = trimAddress(address);
    return { node: drawLink(shown, shown), end: match.index + shown.length };
  }
  if (depth >= MAX_DEPTH) return null;
  if (bracket) return drawBracket(text, start, bracket, depth);
  return drawEmphasis(text, match.index, mark, missing, depth);
}

/** A bare address without the punctuation after it; closing brackets stay if they were opened. */
function trimAddress(address) {
  let length = address.length;
  let numUnopened = address.split(")").length - address.split("(").length;
  for (; length > 0; length--) {
    const last = address[length - 1];
    if (last === ")" && numUnopened > 0) numUnopened--;
    else if (!".,:;!?'\"]".includes(last)) break;
  }
  return address.slice(0, length);
}

/** What lies before a closing sign, which is not part of a longer run of it. */
function drawUntil(text, start, sign, missing, draw) {
  if (missing.has(sign)) return null;
  for (let end = text.indexOf(sign, start); end >= 0; end = text.indexOf(sign, end)) {
    let after = end + sign.length;
    const isRun = sign[0] === "`";
    while (isRun && text[after] === "`") after++;
    if (after === end + sign.length && end > start)
      return { node: draw(text.slice(start, end)), end: after };
    end = after;
  }
  missing.add(sign);
  return null;
}

/** *em*, **strong**, ***both*** and ~~deleted~~; _ counts at the borders of words only. */
function drawEmphasis(text, index, mark, missing, depth) {
  const start = index + mark.length;
  const isWord = (character) => character !== undefined && /[\p{L}\d]/u.test(character);
  const isUnderscore = mark[0] === "_";
  if (missing.has(mark) || /^\s?$/.test(text[start] ?? "")) return null;
  if (isUnderscore && isWord(text[index - 1])) return null;
  const runs = new RegExp(mark === "~~" ? "~~" : `\\${mark[0]}+`, "g");
  runs.lastIndex = start;
  for (let run; (run = runs.exec(text));) {
    const length = run[0].length;
    // A run of three may also close what is inside, as in *a **b***; then its last part counts.
    if (length !== mark.length && length < 3) continue;
    if (/[\s\\]/.test(text[run.index - 1])) continue;
    if (isUnderscore && isWord(text[run.index + length])) continue;
    const end = run.index + Math.max(length - mark.length, 0);
    if (length < mark.length || end <= start) continue;
    const inner = drawInline(text.slice(start, end), depth + 1);
    const tags = mark === "~~" ? ["del"] : [[], ["em"], ["strong"], ["strong", "em"]][mark.length];
    const node = tags.reduceRight((child, tag) => element(tag, {}, child), inner);
    return { node, end: end + mark.length };
  }
  missing.add(mark);
  return null;
}

/** [text](address "title"), and ![alt](address), which becomes a link: the page loads no images. */
function drawBracket(text, start, bracket, depth) {
  const labelEnd = closingIndex(text, start, "[", "]");
  if (labelEnd < 0 || text[labelEnd + 1] !== "(") return null;
  const end = closingIndex(text, labelEnd + 2, "(", ")");
  if (end < 0) return null;
  const address = text
    .slice(labelEnd + 2, end)
    .trim()
    .replace(/\s+["'(][\s\S]*$/, "")
    .replace(/^<|>$/g, "");
  const label = text.slice(start, labelEnd) || address;
  const content = bracket === "![" ? `🖼 ${label}` : drawInline(label, depth + 1);
  return { node: drawLink(address, content), end: end + 1 };
}

function closingIndex(text, start, open, close) {
  let level = 1;
  for (let index = start; index < text.length && index < start + MAX_LABEL; index++) {
    if (text[index] === "\\") index++;
    else if (text[index] === open) level++;
    else if (text[index] === close && --level === 0) return index;
  }
  return -1;
}

/** A link that opens in a window of its own; an address that is not safe becomes plain text. */
function drawLink(address, content) {
  let url = null;
  try {
    url = new URL(address);
  } catch {
    // A relative address would lead to the server itself.
  }
  if (!url || !SAFE_PROTOCOLS.has(url.protocol)) return element("span", {}, content);
  const attributes = { href: url.href, target: "_blank", rel: "noopener noreferrer" };
  return element("a", attributes, content);
}

/** Draws a text that grows. Blocks that can no longer change are not drawn again. */
class MarkdownView {
  constructor() {
    this.node = element("div", { class: "markdown" });
    this.offset = 0; // of the first block that may still change
    this.openNodes = [];
  }

  /** `text` must begin with the text of the last call. */
  update(text) {
    const lines = text.replace(/\r\n?/g, "\n").slice(this.offset).split("\n");
    const expanded = lines.map((line) =>
      line.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    ")),
    );
    const blocks = parseBlocks(expanded);
    this.openNodes.forEach((node) => node.remove());
    const nodes = blocks.map((block) => drawBlock(block));
    this.node.append(...nodes);
    if (!blocks.length) return;
    // The last line is incomplete: as "#" of "#tag", it may yet belong to the block before it.
    const last = blocks.at(-1);
    const mayJoin = last.start === lines.length - 1 && blocks.at(-2)?.end === last.start;
    const numOpen = mayJoin ? 2 : 1;
    this.openNodes = nodes.slice(-numOpen);
    const before = lines.slice(0, blocks.at(-numOpen).start);
    this.offset += before.reduce((sum, line) => sum + line.length + 1, 0);
  }
}
