// Line charts as SVG: values by step, with bands or error bars, read with a pointer or the arrow keys.

const CHART = {width: 460, height: 210, left: 52, right: 20, top: 10, bottom: 30};

// `series`: [{label, colour, dashed, x, y, low, high, band, marks}]. A line is cut where a value is not finite ("nan"), and goes on where a step has none; `band` fills between low and high, `marks` draws points with bars.
function lineChart({title, series, share = false, help = ""}) {
  const known = series.map((one) => ({...one, at: one.x.map((_, i) => i).filter((i) => isNumber(one.y[i]))}))
    .filter((one) => one.at.length || one.y.some(isName));
  if (!known.length) return null;
  const xs = known.flatMap((one) => one.x.filter((_, i) => isNumber(one.y[i]) || isName(one.y[i])));
  const ys = known.flatMap((one) => one.at.flatMap((i) => [one.y[i], one.low?.[i], one.high?.[i]].filter(isNumber)));
  const scale = scales(xs, ys.length ? ys : [0], share);
  const svg = make("svg", {viewBox: `0 0 ${CHART.width} ${CHART.height}`, role: "img", tabindex: "0", "aria-label": spoken(title, known, share)});
  svg.append(...grid(scale, share));
  // All lines of a chart are smoothed or none: else a smooth one would look steadier than those it is compared with.
  const smooth = known.every((one) => !one.band) && known.some((one) => one.at.length > 20);
  for (const one of known) svg.append(...(one.marks ? marksOf(one, scale) : lineOf(one, scale, smooth)));
  const cursor = make("line", {class: "cursor", y1: CHART.top, y2: CHART.height - CHART.bottom, visibility: "hidden"});
  svg.append(cursor);
  const output = make("output", {class: "readout", "aria-live": "polite"}, "");
  const steps = [...new Set(xs)].sort((a, b) => a - b);
  let place = steps.length - 1;
  output.textContent = readout(known, steps[place], share);
  const read = (to) => {
    place = Math.max(0, Math.min(steps.length - 1, to));
    const x = scale.x(steps[place]);
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.setAttribute("visibility", "visible");
    output.textContent = readout(known, steps[place], share);
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = scale.step((event.clientX - box.left) * CHART.width / box.width);
    read(steps.reduce((best, step, i) => Math.abs(step - x) < Math.abs(steps[best] - x) ? i : best, 0));
  });
  svg.addEventListener("keydown", (event) => {
    const moves = {ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: steps.length - 1};
    if (event.key in moves) { event.preventDefault(); read(moves[event.key]); }
  });
  return make("figure", {class: "chart"},
    make("figcaption", {}, title, help ? make("small", {}, help) : null), svg, output, known.length > 1 ? legend(known) : null);
}

function isNumber(value) { return typeof value === "number" && Number.isFinite(value); }
function isName(value) { return typeof value === "string"; }  // "nan", "inf"
function shown(value, share) { return isName(value) ? `not finite (${value})` : share ? percent(value) : number(value); }

function scales(xs, ys, share) {
  let [low, high] = [lowest(ys), highest(ys)];
  if (share) { low = Math.min(low, 0); high = Math.max(high, Math.min(1, high * 1.15), 0.02); if (high > 0.6) high = Math.max(1, high); }
  if (high - low < 1e-12) { const pad = Math.abs(high) || 1; if (low) low -= pad / 2; high += pad / 2; }
  const [first, final] = [lowest(xs), highest(xs)];
  const across = CHART.width - CHART.left - CHART.right, down = CHART.height - CHART.top - CHART.bottom;
  const span = final - first || 1;
  return {
    low, high, first, final,
    x: (step) => CHART.left + across * (step - first) / span,
    y: (value) => CHART.top + down * (1 - (value - low) / (high - low)),
    step: (x) => first + (x - CHART.left) / across * span,
  };
}

function spacing(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
}
function ticks(low, high, most) {
  const every = spacing(low, high, most), found = [];
  for (let i = Math.ceil(low / every); i * every <= high + every * 1e-9; i += 1) found.push(i * every || 0);  // sums would drift: 1.9999 is no step
  return found;
}

function grid(scale, share) {
  const right = CHART.width - CHART.right, bottom = CHART.height - CHART.bottom;
  const values = ticks(scale.low, scale.high, 4), every = spacing(scale.low, scale.high, 4);  // known even where there is a single tick
  const parts = values.flatMap((value) => [
    make("line", {class: "grid", x1: CHART.left, x2: right, y1: scale.y(value), y2: scale.y(value)}),
    make("text", {x: CHART.left - 6, y: scale.y(value) + 4, "text-anchor": "end"}, share ? `${+(100 * value).toFixed(1)} %` : tickText(value, every))]);
  const steps = scale.first === scale.final ? [scale.first] : ticks(scale.first, scale.final, 6).filter(Number.isInteger);
  return [...parts, ...steps.map((step) => make("text", {x: scale.x(step), y: bottom + 16, "text-anchor": "middle"}, step))];
}
// A tick's value with just enough digits to differ from the next one's.
function tickText(value, every) {
  const size = Math.abs(value), digits = (unit) => Math.max(0, unit - Math.floor(Math.log10(every) + 1e-9)) || 0;
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(digits(Math.floor(Math.log10(size)))) : String(+value.toFixed(digits(0)));
}

function lineOf(one, scale, smooth) {
  const drawn = (points, options) => make("polyline", {points: joined(points), fill: "none", stroke: one.colour, ...options});
  return unbroken(one).flatMap((at) => {
    const points = at.map((i) => [scale.x(one.x[i]), scale.y(one.y[i])]);
    const bold = smooth ? averaged(at.map((i) => one.y[i])).map((y, place) => [points[place][0], scale.y(y)]) : points;
    return [one.band ? bandOf(one, at, scale) : "", smooth ? drawn(points, {"stroke-width": 1, opacity: "0.3"}) : "",
      drawn(bold, {"stroke-width": 2, "stroke-dasharray": one.dashed ? "6 3" : "none"}),
      at.length === 1 ? make("circle", {cx: points[0][0], cy: points[0][1], r: 3, fill: one.colour}) : ""].filter(Boolean);
  });
}
function unbroken(one) {
  const parts = [[]];
  one.y.forEach((value, i) => { if (isNumber(value)) parts.at(-1).push(i); else if (isName(value)) parts.push([]); });
  return parts.filter((at) => at.length);
}
function bandOf(one, at, scale) {
  const edge = [...at.map((i) => [one.x[i], one.high[i]]), ...[...at].reverse().map((i) => [one.x[i], one.low[i]])];
  return make("polygon", {points: joined(edge.map(([x, y]) => [scale.x(x), scale.y(y)])), fill: one.colour, opacity: "0.18"});
}
function joined(points) { return points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" "); }
const SMOOTHED = "A bold line over a thin one is the mean of the last 10 steps.";
function averaged(values, window = 10) {
  return values.map((_, i) => {
    const part = values.slice(Math.max(0, i + 1 - window), i + 1);
    return part.reduce((sum, value) => sum + value, 0) / part.length;
  });
}

function marksOf(one, scale) {
  const line = one.at.length > 1 ? [make("polyline", {points: joined(one.at.map((i) => [scale.x(one.x[i]), scale.y(one.y[i])])), fill: "none", stroke: one.colour, "stroke-width": 1, "stroke-dasharray": "4 3"})] : [];
  return (one.band ? [bandOf(one, one.at, scale)] : []).concat(line, one.at.flatMap((i) => [
    isNumber(one.low?.[i]) ? make("line", {x1: scale.x(one.x[i]), x2: scale.x(one.x[i]), y1: scale.y(one.low[i]), y2: scale.y(one.high[i]), stroke: one.colour, "stroke-width": 2}) : "",
    make("circle", {cx: scale.x(one.x[i]), cy: scale.y(one.y[i]), r: 4, fill: one.dashed ? "none" : one.colour, stroke: one.colour})])).filter(Boolean);
}

function readout(known, step, share) {
  const found = known.map((one) => [one, one.x.indexOf(step)]).filter(([one, i]) => isNumber(one.y[i]) || isName(one.y[i]));
  return `Step ${step}: ` + found.map(([one, i]) => {
    const range = isNumber(one.low?.[i]) ? ` [${shown(one.low[i], share)}, ${shown(one.high[i], share)}]` : "";
    return `${known.length > 1 ? `${one.label} ` : ""}${shown(one.y[i], share)}${range}`;
  }).join(", ");
}
function spoken(title, known, share) {
  return known.map((one) => {
    const values = one.at.map((i) => one.y[i]), name = `${title}${known.length > 1 ? `, ${one.label}` : ""}`;
    return !values.length ? `${name}: finite at no step` : `${name}: from ${shown(values[0], share)} at step ${one.x[one.at[0]]} to ` +
      `${shown(values.at(-1), share)} at step ${one.x[one.at.at(-1)]}, lowest ${shown(lowest(values), share)}, highest ${shown(highest(values), share)}`;
  }).join(". ") + ". Arrow keys read single steps.";
}
function legend(known) {
  return make("ul", {class: "legend"}, known.map((one) => make("li", {}, make("span", {class: one.dashed ? "dot hollow" : "dot", style: `--dot:${one.colour}`}), one.label)));
}
