// Canvas: a workflow after every edit, inputs and outputs of each of its nodes, and the parts of the reward.

SECTIONS.canvas = {
  get absent() { return !DATA.runs.some((run) => run.world === "Canvas" && run.pieces.length); },
  async show([key, group, episode, edit]) {
    const pieces = allPieces().filter(({run}) => run.world === "Canvas");
    const chosen = pieces.find(({piece}) => piece.key === key) || pieces.filter(({piece}) => piece.kind === "training").at(-1) || pieces.at(-1);
    const made = await piece(chosen.piece.key);
    const worth = (one) => (one.success >= 1 ? 1000 : 0) + one.turns;
    const longest = [...chosen.piece.episodes].sort((a, b) => worth(b) - worth(a))[0];
    this.draw(chosen, made, Number(group ?? longest.group), Number(episode ?? longest.episode), edit === undefined ? null : Number(edit));
  },
  draw({run, piece: described}, made, group, place, edit) {
    const episode = made.groups[group].episodes[place], edits = [...episode.turns.slice(1).map((turn, i) => ({...turn, made: episode.turns[i]})), {view: episode.view, picture: episode.picture, made: episode.turns.at(-1)}];
    const target = document.getElementById("section-canvas"), panel = make("div", {"aria-live": "polite"});
    const show = (at) => replace(panel, this.edit(made, edits, at));
    const slider = make("input", {type: "range", min: 1, max: edits.length, value: edit ?? edits.length, "aria-label": "Edit", oninput: () => show(Number(slider.value) - 1)});
    const all = allPieces().filter(({run: of}) => of.world === "Canvas");
    const many = described.episodes.map((one) => [`${one.group}/${one.episode}`, `${one.id}: ${wonOrLost({...one, outcome: {success: one.success}})}, ${one.turns} edits`]);
    replace(target, make("h2", {}, "A workflow as it grew"),
      make("div", {class: "filters"},
        choice("From", all.map(({run: of, piece}) => [piece.key, `${DATA.runs.length > 1 ? `${of.name}, ` : ""}${piece.label}`]), described.key, (value) => goTo("canvas", value)),
        choice("Episode", many, `${group}/${place}`, (value) => goTo("canvas", described.key, ...value.split("/")))),
      make("p", {class: `outcome ${wonOrLost(episode)}`}, make("strong", {}, wonOrLost(episode)), `, reward ${number(episode.reward)}${rewardParts(run, episode) ? ` = ${rewardParts(run, episode)}` : ""}`),
      structureParts(episode),
      make("details", {}, make("summary", {}, "The problem"), make("pre", {}, Object.entries(made.groups[group].payload).map(([name, text]) => `${name}: ${text}`).join("\n"))),
      make("label", {class: "field wide"}, make("span", {}, `Edit 1 to ${edits.length}`), slider), panel, operatorUse(run));
    show(Number(slider.value) - 1);
  },
  edit(made, edits, at) {
    const edit = edits[at], of = edits.length;
    const nodes = edits.slice(0, at + 1).findLast((one) => one.made.trace)?.made.trace.nodes || [];  // a refused edit leaves what was there
    return [make("h3", {}, `Edit ${at + 1} of ${of}: `, make("code", {}, edit.made.action || "no action")), edit.made.valid ? null : make("p", {class: "bad"}, "It was refused."),
      drawing(made.pictures[edit.picture], made.views[edit.view]) || make("pre", {}, made.views[edit.view]),
      nodes.length ? nodes.map((node) => make("details", {class: "node-run"}, make("summary", {}, `${node.id} ${node.operator}: ${node.status}${node.cached ? ", remembered from when it took" : ","} ${number(node.tokens)} tokens, cost ${number(node.cost)}, ${duration(node.seconds)}`),
        make("h4", {}, "It was given"), make("pre", {}, node.inputs), make("h4", {}, "It gave"), make("pre", {}, node.outputs || node.error)))
        : make("p", {class: "hint"}, "Nothing has been run yet.")];
  },
};

// Parts of the reward of a workflow: base + S (structure), and C (correct answer) once S is high enough.
function structureParts(episode) {
  if (!episode.structure) return null;
  const {base, S, C, paid} = episode.structure;
  const names = {checks: "checkers", formats: "formatters", distinct_operators: "kinds of operators", branching: "control structures", operators: "operators", executor_calls: "calls", executor_tokens: "tokens", executor_cost: "cost"};
  const counted = Object.entries(names).filter(([name]) => name in episode.outcome).map(([name, text]) => `${text} ${number(episode.outcome[name])}`).join(", ");
  return make("p", {class: "parts"}, `Reward of the workflow: base ${number(base)} + structure S ${number(S)} + ` +
    (C > 0 && paid === 0 ? `0, for the answer C = ${number(C)} is not paid before S is high enough` : `answer C ${number(C)}`) + `. It has ${counted}.`);
}

// What workflows at the end of episodes are made of, over training: how many differ, and which operators they use.
function operatorUse(run) {
  if (!run.workflows.length) return null;
  const names = [...new Set(run.workflows.flatMap((one) => Object.keys(one.operators)))];
  const x = run.workflows.map((one) => one.step);
  return [make("h2", {}, `Over training${DATA.runs.length > 1 ? ` of ${run.name}` : ""}`), make("p", {class: "hint"}, SMOOTHED), make("div", {class: "charts"},
    lineChart({title: "Unique workflows", share: true, help: "of the batch's finished ones", series: [{label: run.name, colour: COLOURS[0], x, y: run.workflows.map((one) => one.unique)}]}),
    lineChart({title: "Use of operators", help: "a workflow, on average", series: names.map((name, i) => ({label: name, ...lookOf(i), x, y: run.workflows.map((one) => one.operators[name] || 0)}))}))];
}
