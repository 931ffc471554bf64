// The page's data, elements, sections and addresses. Every section is one object in SECTIONS with `show(address)`.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SECTIONS = {};
const COLOURS = Array.from({length: 8}, (_, i) => `var(--line-${i})`);  // page.css has two of each, for light and dark
// Where there are more lines than colours, the second line of a colour is dashed, and hollow in the legend.
const lookOf = (i) => ({colour: COLOURS[i % COLOURS.length], dashed: i >= COLOURS.length});

// An element with attributes and children. Strings are added as text nodes, never as HTML: a model may have written them.
function make(name, attributes = {}, ...children) {
  const space = SVG_NAMES.has(name) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const element = document.createElementNS(space, name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}
const SVG_NAMES = new Set(
  ["svg", "g", "path", "line", "rect", "circle", "text", "tspan", "polyline", "polygon", "image", "defs", "marker", "title"]);

function replace(parent, ...children) { parent.replaceChildren(...children.flat(Infinity).filter(Boolean)); return parent; }

// Not Math.min(...values): browsers limit the number of arguments of a call, and a long run has more values.
function lowest(values) { return values.reduce((least, value) => Math.min(least, value), Infinity); }
function highest(values) { return values.reduce((most, value) => Math.max(most, value), -Infinity); }

function counted(count, noun) { return `${number(count)} ${noun}${count === 1 ? "" : "s"}`; }

function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";  // never −0
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  return Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : digits);
}
function percent(value) { return value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`; }
function isNone(value) { return Math.abs(value) < 0.005; }  // as two digits show it
function signed(value) { return value === null || value === undefined ? "–" : isNone(value) ? "0.00" : `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`; }
function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 && seconds > 0 ? 1 : 0)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function table(head, rows, caption = "") {
  return make("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": caption || "table"},
    make("table", {},
      caption ? make("caption", {}, caption) : null,
      make("thead", {}, make("tr", {}, head.map((cell) => make("th", {scope: "col"}, cell)))),
      make("tbody", {}, rows.map((row) => make("tr", {}, row.map((cell, place) =>
        place ? make("td", {}, cell) : make("th", {scope: "row"}, cell)))))));
}

function choice(label, options, chosen, onchange) {
  const select = make("select", {onchange: () => onchange(select.value)},
    options.map(([value, text]) => make("option", {value, selected: String(value) === String(chosen)}, text)));
  return make("label", {class: "field"}, make("span", {}, label), select);
}

// A drawing by the run's world. Embedded as an image, an SVG runs no scripts: a user's world may draw anything.
function drawing(svg, description) {
  return svg ? make("img", {class: "drawing", src: imageOf(svg), alt: description}) : null;
}
function imageOf(svg) { return `data:image/svg+xml,${encodeURIComponent(svg)}`; }

// Pieces: episodes of a batch or an evaluation, unpacked once, when they are first asked for.
const unpacked = new Map();
function piece(key) {
  if (!unpacked.has(key)) unpacked.set(key, unpack(key));
  return unpacked.get(key);
}
async function unpack(key) {
  const bytes = Uint8Array.from(atob(document.getElementById(key).textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// Addresses: #section/part/part. They are kept in the browser's history, so that Back goes back and a place can be sent on.
function goTo(...parts) { location.hash = parts.map(encodeURIComponent).join("/"); }
function address() {
  try { return location.hash.slice(1).split("/").map(decodeURIComponent); } catch { return [""]; }  // "#%" is none
}

const TABS = [["overview", "Overview"], ["episodes", "Episodes"], ["credit", "Credit"], ["canvas", "Canvas"], ["runs", "Runs"]];

async function open() {
  const [asked, ...rest] = address();
  const name = SECTIONS[asked] && !SECTIONS[asked].absent ? asked : "overview";
  for (const [id] of TABS) {
    document.getElementById(`section-${id}`).hidden = id !== name;
    const tab = document.getElementById(`tab-${id}`);
    if (id === name) tab?.setAttribute("aria-current", "page"); else tab?.removeAttribute("aria-current");
  }
  try {
    await SECTIONS[name].show(name === asked ? rest : []);
  } catch (error) {  // for example an address that was copied from another page
    replace(document.getElementById(`section-${name}`), make("p", {class: "bad", role: "alert"}, `This cannot be shown: ${error.message}`), make("a", {href: `#${name}`}, "Begin anew"));
    console.error(error);
    document.body.dataset.failed = error.message;
  }
  document.body.dataset.ready = name;  // for programs that wait until the page has been drawn
}

// Names of a run's estimators: one, unless its policies have different ones.
function creditOf(run) { return [...new Set(Object.values(run.estimators))].join(" and "); }

function start() {
  const names = DATA.runs.map((run) => run.name);
  document.getElementById("title").textContent = names.join(", ");
  const first = DATA.runs[0];
  document.getElementById("subtitle").textContent = names.length > 1
    ? `${names.length} runs` : `${first.world} with ${creditOf(first)}, ${first.steps} steps`;
  replace(document.getElementById("tabs"), TABS.filter(([id]) => SECTIONS[id] && !SECTIONS[id].absent).map(([id, text]) =>
    make("li", {}, make("a", {href: `#${id}`, id: `tab-${id}`}, text))));
  if (location.protocol.startsWith("http")) follow();
  addEventListener("hashchange", open);
  open();
}

// On a served page: offer a button once the run has gone on. The page does not reload by itself while somebody reads.
async function follow() {
  const written = async () => (await fetch("/written")).text();
  const begun = await written();
  const timer = setInterval(async () => {
    if (await written().catch(() => begun) === begun) return;
    clearInterval(timer);
    document.querySelector("header").append(make("button", {id: "newer", onclick: () => location.reload()}, "The run has gone on: show it"));
  }, 3000);
}
document.addEventListener("DOMContentLoaded", start);
