// Credit: the state graph of a group, with the states in its nodes; a move leads to the turns that made it and why they
// got their credit.

const NODE = {width: 104, height: 128, across: 112, down: 26, margin: 24, picture: 72};

SECTIONS.credit = {
  get absent() { return !creditPieces().length; },
  async show([key, group, edge]) {
    const pieces = creditPieces();
    const chosen = pieces.find(({piece}) => piece.key === key) || mostDivided(pieces);
    const made = await piece(chosen.piece.key);
    const ranks = chosen.piece.interest;
    const place = group === undefined ? ranks.indexOf([...ranks].sort(byRank)[0]) : Number(group);
    this.draw(chosen, made, place, edge === undefined ? null : Number(edge));
  },
  draw({run, piece: described}, made, place, edge) {
    const group = made.groups[place], target = document.getElementById("section-credit");
    const won = group.episodes.filter((one) => wonOrLost(one) === "won").length;
    const panel = make("div", {class: "panel", "aria-live": "polite"});
    const graph = group.graph ? stateGraph(made, group, (at) => { history.replaceState(null, "", `#credit/${described.key}/${place}/${at}`); showMove(panel, described, made, place, at); }) : null;
    const paths = group.episodes.map((one, i) => [i, `episode ${i + 1}: ${wonOrLost(one)}, reward ${number(one.reward)}`]);
    replace(target,
      make("h2", {}, "Why a move got its credit"),
      make("p", {class: "hint"}, "Every box is a state that the group's episodes were in, with its value V (what the policy could expect from there) and how often it was visited. " +
        "Green moves have an advantage above 0, orange ones below; thicker ones were made more often. Choose a move to see the turns that made it." + (group.graph?.note ? ` ${group.graph.note}` : "")),
      make("div", {class: "filters"},
        choice("Batch", creditPieces().map(({run: of, piece}) => [piece.key, `${DATA.runs.length > 1 ? `${of.name}, ` : ""}${piece.label}`]), described.key, (key) => goTo("credit", key)),
        choice("Group", made.groups.map((one, i) => [i, `${i + 1}: ${one.episodes.filter((e) => wonOrLost(e) === "won").length} of ${one.episodes.length} won`]), place, (value) => goTo("credit", described.key, value)),
        graph ? choice("Path of", [["", "none"], ...paths], "", (value) => graph.highlight(value === "" ? null : Number(value))) : null),
      make("p", {}, `${described.label}, task ${group.task}: ${won} of ${group.episodes.length} episodes won, credit by ${run.estimators[described.policy]}.` + (described.of > described.groups ? ` The page has ${described.groups} of the batch's ${described.of} groups.` : "")),
      graph ? graph.element : make("p", {}, "This group has no turns."),
      panel,
      make("h3", {}, "Episodes of the group"),
      table(["Episode", "Outcome", "Reward", "Moves and their advantages"], group.episodes.map((one, i) => [
        make("a", {href: `#episodes/${described.key}/${place}/${i}`}, `episode ${i + 1}`), outcomeOf({...one, success: one.outcome.success}), number(one.reward),
        make("span", {}, one.turns.map((turn, t) => make("button", {class: "move", title: turn.why, onclick: () => { const at = edgeOf(group.graph, i, t); if (at >= 0) graph.choose(at); }},
          `${middle(turn.action || "invalid", 18)} `, make("span", {class: !isNumber(turn.advantage) || isNone(turn.advantage) ? null : turn.advantage < 0 ? "bad" : "good"}, signed(turn.advantage)))))]), "Episodes of the group"));
    if (graph && edge !== null) graph.choose(edge);
  },
};

function creditPieces() { return allPieces().filter(({piece}) => piece.kind === "training"); }
function byRank(a, b) { return b[0] - a[0] || b[1] - a[1]; }
function edgeOf(graph, episode, turn) { return graph.edges.findIndex((edge) => edge.moves.some(([e, t]) => e === episode && t === turn)); }

// The newest batch with a group that is divided well: half of its episodes won, or nearly.
function mostDivided(pieces) {
  const good = pieces.filter(({piece}) => piece.interest.some(([evenness]) => evenness >= 0.25));
  return good.at(-1) || [...pieces].sort((a, b) => byRank([...a.piece.interest].sort(byRank)[0], [...b.piece.interest].sort(byRank)[0]))[0];
}

function stateGraph(made, group, onmove) {
  const {nodes, edges} = group.graph, at = Object.fromEntries(nodes.map((node) => [node.id, node]));
  const x = (node) => NODE.margin + node.column * (NODE.width + NODE.across), y = (node) => NODE.margin + 20 + node.row * (NODE.height + NODE.down);
  const width = highest(nodes.map(x)) + NODE.width + NODE.margin, height = highest(nodes.map(y)) + NODE.height + NODE.margin;
  const svg = make("svg", {viewBox: `0 0 ${width} ${height}`, width, height, class: "graph", "aria-label": `State graph with ${nodes.length} states and ${edges.length} moves`});
  const most = Math.max(highest(nodes.map((node) => Math.abs(node.value))), 1e-9);
  svg.append(make("defs", {}, ["gain", "loss", "even"].map((kind) => make("marker", {id: `head-${kind}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, orient: "auto", markerUnits: "userSpaceOnUse"},
    make("path", {d: "M0 0 L8 4 L0 8 z", class: `head ${kind}`})))));
  const labels = [];  // those that are placed, with their middles, so that no label covers another
  const drawnEdges = edges.map((edge, i) => {
    const kind = isNone(edge.advantage) ? "even" : edge.advantage > 0 ? "gain" : "loss";
    const [path, tx, wanted] = route(at[edge.source], at[edge.target], x, y);
    let ty = wanted;
    while (labels.some((other) => Math.abs(other.x - tx) < 96 && Math.abs(other.y - ty) < 13)) ty += 13;
    labels.push({x: tx, y: ty, text: make("text", {x: tx, y: ty, "text-anchor": "middle", class: "label"}, `${labelOf(edge)} ${signed(edge.advantage)}`)});
    const name = `${edge.actions.map((one) => one.action).join(" or ")}, advantage ${signed(edge.advantage)}, made ${counted(edge.moves.length, "time")}`;
    const element = make("g", {class: `edge ${kind}`, role: "button", tabindex: "0", "aria-label": name, onclick: () => choose(i),
      onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(i); } }},
      make("title", {}, name), make("path", {d: path, class: "hit"}),
      make("path", {d: path, class: "line", "stroke-width": 1.2 + Math.log2(edge.moves.length) * 1.3, "marker-end": `url(#head-${kind})`}));
    svg.append(element);
    return element;
  });
  const said = tellingLines(nodes.map((node) => made.views[node.view]));
  nodes.forEach((node, i) => svg.append(nodeBox(made, node, x(node), y(node), node.value / most, said[i])));
  svg.append(...labels.map((label) => label.text));  // above all, where a pointer goes through them
  function choose(i) {
    for (const marked of [drawnEdges, labels.map((label) => label.text)]) marked.forEach((element, place) => element.classList.toggle("chosen", place === i));
    onmove(i);
  }
  function highlight(episode) {
    drawnEdges.forEach((element, i) => {
      const on = episode !== null && edges[i].moves.some(([e]) => e === episode);
      for (const marked of [element, labels[i].text]) marked.classList.toggle("off-path", episode !== null && !on);
    });
  }
  return {element: make("div", {class: "scroll graphbox", tabindex: "0", role: "region", "aria-label": "State graph"}, svg), choose, highlight};
}

// Label of an arrow. Several actions that lead from one state to the same other one share it: it names all, or their number.
function labelOf(edge) {
  const all = edge.actions.map((one) => one.action).join(" / ");
  return edge.actions.length > 1 && all.length > 16 ? `${edge.actions.length} actions` : edge.actions.length > 1 ? all : middle(all, 12);
}
// Shortened in the middle: names such as click[b000000440] and click[b000000228] differ only at their ends.
function middle(text, most) { return text.length > most ? `${text.slice(0, most / 2)}…${text.slice(1 - most / 2)}` : text; }

// For each state the five lines that the fewest other states have, in their order: common lines tell no states apart.
function tellingLines(views) {
  const states = new Map();
  for (const line of views.flatMap((view) => [...new Set(view.split("\n"))])) states.set(line, (states.get(line) || 0) + 1);
  return views.map((view) => view.split("\n").map((line, i) => [line, i]).filter(([line]) => line.trim())
    .sort(([a, i], [b, j]) => states.get(a) - states.get(b) || i - j).slice(0, 5).sort(([, i], [, j]) => i - j).map(([line]) => line));
}

function nodeBox(made, node, x, y, share, lines) {
  const label = `${node.end ? `${node.end}, ` : ""}V ${number(node.value, 2)} ×${node.visits}`;
  const picture = made.pictures[node.picture];
  return make("g", {class: `node ${node.end || (node.start ? "begin" : "")}`},
    make("title", {}, `${label}\n${made.views[node.view]}`),
    make("rect", {x, y, width: NODE.width, height: NODE.height, rx: 8, style: `--share:${Math.round(55 * Math.max(share, 0))}%`}),
    picture ? make("image", {href: imageOf(picture), x: x + (NODE.width - NODE.picture) / 2, y: y + 8, width: NODE.picture, height: NODE.picture, preserveAspectRatio: "xMidYMid meet"})
      : (lines.length ? lines : ["not recorded"]).map((line, i) => make("text", {x: x + 6, y: y + 18 + 13 * i, class: "view"}, shorten(line, 14))),
    make("text", {x: x + NODE.width / 2, y: y + NODE.height - 26, "text-anchor": "middle", class: "name"}, node.end || (node.start ? "start" : "")),
    make("text", {x: x + NODE.width / 2, y: y + NODE.height - 10, "text-anchor": "middle"}, `V ${number(node.value, 2)} ×${node.visits}`));
}

function route(source, target, x, y) {
  const [x0, y0, x1, y1] = [x(source), y(source), x(target), y(target)], {width, height} = NODE;
  if (source === target) return [`M${x0 + width * 0.3} ${y0} C${x0} ${y0 - 34} ${x0 + width} ${y0 - 34} ${x0 + width * 0.7} ${y0}`, x0 + width / 2, y0 - 26];
  if (x1 > x0) {
    const [sy, ty, bend] = [y0 + height * 0.4, y1 + height * 0.4, Math.max(40, (x1 - x0 - width) / 2)];
    return [`M${x0 + width} ${sy} C${x0 + width + bend} ${sy} ${x1 - bend} ${ty} ${x1} ${ty}`, (x0 + width + x1) / 2, (sy + ty) / 2 - 5];
  }
  if (x1 === x0) return [`M${x0 + width} ${y0 + height / 2} C${x0 + width + 46} ${y0 + height / 2} ${x0 + width + 46} ${y1 + height / 2} ${x1 + width} ${y1 + height / 2}`, x0 + width + 40, (y0 + y1 + height) / 2];
  return [`M${x0} ${y0 + height * 0.75} C${x0 - 40} ${y0 + height * 0.75} ${x1 + width + 40} ${y1 + height * 0.75} ${x1 + width} ${y1 + height * 0.75}`, (x0 + x1 + width) / 2, (y0 + y1) / 2 + height * 0.75 + 12];
}

function showMove(panel, described, made, place, at) {
  const group = made.groups[place], edge = group.graph.edges[at];
  const each = edge.actions.map((one) => `“${shorten(one.action, 60)}” ${signed(one.advantage)} (×${one.count})`).join(", ");
  replace(panel, make("h3", {}, edge.actions.length > 1 ? `Moves to the same state: ${each}; together ${signed(edge.advantage)} on average`
    : `The move “${shorten(edge.actions[0].action, 60)}”: ${signed(edge.advantage)} on average, made ${counted(edge.moves.length, "time")}`),
    make("ol", {class: "why-list"}, alike(group, edge.moves).map(({episode, turns, reply, why}) =>
      make("li", {}, make("a", {href: `#episodes/${described.key}/${place}/${episode}`}, `episode ${episode + 1} (${wonOrLost(group.episodes[episode])}), ${spelled(turns)}`), ": ", make("code", {}, shorten(reply, 120)), " ", why))));
}

// Moves of one episode with the same reply and reason, such as steps against a wall, joined into one line of the list.
function alike(group, moves) {
  const found = new Map();
  for (const [episode, t] of moves) {
    const turn = group.episodes[episode].turns[t], reply = turn.reply.join(""), key = JSON.stringify([episode, reply, turn.why]);
    if (!found.has(key)) found.set(key, {episode, reply, why: turn.why, turns: []});
    found.get(key).turns.push(t + 1);
  }
  return [...found.values()];
}

// “move 3”, “moves 1 to 8, 11”
function spelled(turns) {
  const spans = [];
  for (const turn of [...turns].sort((a, b) => a - b))
    if (spans.length && spans.at(-1)[1] === turn - 1) spans.at(-1)[1] = turn; else spans.push([turn, turn]);
  return `move${turns.length > 1 ? "s" : ""} ${spans.map(([from, to]) => from === to ? from : `${from}${to > from + 1 ? " to " : ", "}${to}`).join(", ")}`;
}
