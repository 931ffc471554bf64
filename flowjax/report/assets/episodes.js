// Episodes: found by outcome, kind, version, step or words; read turn by turn; two of a group side by side.

const ROWS = 100;  // of the list, at first

SECTIONS.episodes = {
  filters: {piece: "", outcome: "", kind: "", version: "", words: ""}, rows: ROWS, found: null, newest: null, colour: "logprobs",
  get absent() { return !DATA.runs.some((run) => run.pieces.length); },
  async show([key, group, episode, other]) {
    if (key && episode !== undefined) return this.read(key, Number(group), Number(episode), other === undefined ? null : Number(other));
    if (key !== undefined && key !== "") this.filters.piece = key;
    return this.list();
  },

  // ------------------------------------------------------------------------------------------------------------- list
  list() {
    const all = everyEpisode();
    const values = (name) => [...new Set(all.flatMap(name))].filter((value) => value !== "").sort((a, b) => typeof a === "number" ? a - b : String(a).localeCompare(b));
    const set = (name) => (value) => { this.filters[name] = value; this.rows = ROWS; this.draw(); };
    const words = make("input", {type: "search", value: this.filters.words, placeholder: "in prompts, replies and actions", onchange: () => this.search(words.value)});
    this.target = make("div", {"aria-live": "polite"});
    replace(document.getElementById("section-episodes"),
      DATA.runs.flatMap((run) => run.notes.map((note) => make("p", {class: "hint"}, DATA.runs.length > 1 ? `${run.name}: ${note}` : note))),
      make("form", {class: "filters", role: "search", onsubmit: (event) => { event.preventDefault(); this.search(words.value); }},
        choice("From", [["", "everything"], ...allPieces().map(({run, piece}) => [piece.key, `${DATA.runs.length > 1 ? `${run.name}, ` : ""}${piece.label}${piece.of > piece.groups ? ` (${piece.groups} of ${piece.of} groups)` : ""}`])], this.filters.piece, (value) => { this.filters.piece = value; this.rows = ROWS; this.search(this.filters.words); }),
        choice("Outcome", [["", "all"], ["won", "won"], ["lost", "lost"], ["invalid", "with invalid replies"], ["cut", "with cut replies"], ["failed", "machinery failed"]], this.filters.outcome, set("outcome")),
        values((e) => e.kind)[0] ? choice("Kind of task", [["", "all"], ...values((e) => e.kind).map((kind) => [kind, kind])], this.filters.kind, set("kind")) : null,
        choice("Version", [["", "all"], ...values((e) => e.versions).map((version) => [version, version])], this.filters.version, set("version")),
        make("label", {class: "field"}, make("span", {}, "Words"), words),
        make("button", {type: "submit"}, "Search")), this.target);
    return this.search(this.filters.words);  // again: the last search was among the episodes that were chosen then
  },
  matches(one) {
    const {piece, outcome, kind, version} = this.filters;
    const outcomes = {won: one.success >= 1, lost: one.success < 1 && ["ok", "truncated"].includes(one.status), invalid: one.invalid > 0, cut: one.cut > 0, failed: !["ok", "truncated"].includes(one.status)};
    return (!piece || one.piece.key === piece) && (!outcome || outcomes[outcome]) && (!kind || one.kind === kind) &&
      (!version || one.versions.includes(Number(version))) && (!this.found || this.found.has(`${one.piece.key}/${one.group}/${one.episode}`));
  },
  async search(words) {
    const search = this.newest = Symbol();
    this.filters.words = words.trim();
    if (!this.filters.words) { this.found = null; return this.draw(); }
    const wanted = this.filters.words.toLowerCase(), found = new Set();
    const pieces = allPieces().filter(({piece}) => !this.filters.piece || piece.key === this.filters.piece);
    for (const [done, {piece: described}] of pieces.entries()) {
      if (search !== this.newest) return;  // a newer search has begun meanwhile: this one must not write into the list
      if (done % 5 === 0) replace(this.target, make("p", {}, `Searching ${described.label} …`));
      const made = await piece(described.key);
      const prompts = made.prompts.map((text) => text.toLowerCase().includes(wanted));
      made.groups.forEach((group, g) => group.episodes.forEach((episode, e) => {
        const says = (turn) => prompts[turn.prompt] || turn.reply.join("").toLowerCase().includes(wanted) || turn.action.toLowerCase().includes(wanted);
        if (episode.turns.some(says) || group.task.toLowerCase().includes(wanted)) found.add(`${described.key}/${g}/${e}`);
      }));
    }
    if (search !== this.newest) return;  // a newer search has begun during the last wait for a piece
    this.found = found;
    this.draw();
  },
  draw() {
    const found = everyEpisode().filter((one) => this.matches(one));
    const kinds = found.some((one) => one.kind);
    const rows = found.slice(0, this.rows).map((one) => [
      make("a", {href: `#episodes/${one.piece.key}/${one.group}/${one.episode}`}, one.id), `${DATA.runs.length > 1 ? `${one.run.name}, ` : ""}${one.piece.label}`, ...(kinds ? [one.kind] : []),
      outcomeOf(one), number(one.reward), one.turns, one.invalid || "", one.versions.join(", ")]);
    replace(this.target, make("p", {class: "count"}, `${number(found.length)} episodes`),
      rows.length ? table(["Episode", "From", ...(kinds ? ["Kind"] : []), "Outcome", "Reward", "Turns", "Invalid", "Version"], rows, "Episodes") : make("p", {}, "None fits. Take a filter away."),
      found.length > this.rows ? make("button", {onclick: () => { this.rows += 5 * ROWS; this.draw(); }}, "Show more") : null);
  },

  // ----------------------------------------------------------------------------------------------------------- reading
  async read(key, group, place, other) {
    const made = await piece(key), shownGroup = made.groups[group], episode = shownGroup.episodes[place];
    const target = document.getElementById("section-episodes");
    const {run, piece: described} = allPieces().find(({piece: one}) => one.key === key);
    const siblings = shownGroup.episodes.map((one, i) => [i, `episode ${i + 1}: ${wonOrLost(one)}, ${one.turns.length} turns`]).filter(([i]) => i !== place);
    const scale = colourScale(made, this.colour);
    const again = () => this.read(key, group, place, other);
    replace(target,
      make("p", {}, make("a", {href: "#episodes"}, "← all episodes"), shownGroup.graph ? [" · ", make("a", {href: `#credit/${key}/${group}`}, "credit of its group")] : ""),
      make("h2", {}, `Episode ${episode.trajectory_id}`),
      make("p", {class: `outcome ${wonOrLost(episode)}`}, make("strong", {}, wonOrLost(episode)), ` after ${episode.turns.length} turns, reward ${number(episode.reward)}` +
        (rewardParts(run, episode) ? ` = ${rewardParts(run, episode)}` : "") + `. ${described.label}, task ${shownGroup.task}${shownGroup.kind ? ` (${shownGroup.kind})` : ""}, seed ${episode.seed}, status ${episode.status}${episode.error ? `: ${episode.error}` : ""}.`),
      make("details", {}, make("summary", {}, "Task and outcome"), table(["Name", "Value"], [...Object.entries(shownGroup.payload).map(([name, text]) => [name, make("pre", {}, text)]),
        ...Object.entries(episode.outcome).map(([name, value]) => [name, number(value)])], "Task and outcome")),
      make("div", {class: "filters"},
        choice("Colour tokens by", [["logprobs", "log-prob when sampled"], ["ratio", "ratio of training to sampling"], ["advantage", "advantage"], ["", "nothing"]], this.colour, (value) => { this.colour = value; again(); }),
        siblings.length ? choice("Beside it", [["", "nothing"], ...siblings], other ?? "", (value) => goTo("episodes", key, group, place, ...(value === "" ? [] : [value]))) : null),
      scale.legend,
      other === null ? make("ol", {class: "turns"}, episode.turns.map((turn, i) => make("li", {}, turnCard(made, shownGroup, episode, i, scale, run))), lastState(made, episode))
        : sideBySide(made, shownGroup, place, other, scale, run));
    target.querySelector("h2").scrollIntoView({block: "nearest"});
  },
};

function allPieces() { return DATA.runs.flatMap((run) => run.pieces.map((piece) => ({run, piece}))); }
function everyEpisode() { return allPieces().flatMap(({run, piece}) => piece.episodes.map((one) => ({...one, run, piece}))); }
function wonOrLost(episode) { return !["ok", "truncated"].includes(episode.status) ? episode.status : (episode.outcome?.success ?? episode.success) >= 1 ? "won" : "lost"; }
function outcomeOf(one) { return make("span", {class: `outcome ${wonOrLost(one)}`}, wonOrLost(one)); }

function rewardParts(run, episode) {
  const weight = (name) => run.weights[episode.policy]?.[name] ?? 1;
  return Object.entries(episode.rewards || {}).map(([name, value]) => `${name} ${number(value)}${weight(name) === 1 ? "" : ` × ${weight(name)}`}`).join(" + ");
}

function turnCard(made, group, episode, i, scale, run) {
  const turn = episode.turns[i];
  const versions = turn.spans ? turn.spans.map(([version, tokens]) => `${version} (${tokens} tokens)`).join(", then ") : turn.version;
  const facts = [`version ${versions}`, turn.finish_reason === "length" ? "cut at the limit of tokens" : "", `reward of the step ${number(turn.reward)}`, `${duration(turn.generate_s)} to sample`].filter(Boolean).join(", ");
  return make("article", {class: "turn", id: `turn-${i + 1}`, "aria-label": `Turn ${i + 1}`},
    make("h3", {}, `Turn ${i + 1}: `, turn.action ? make("code", {}, shorten(turn.action, 80)) : make("em", {class: "bad"}, "no legal action"), turn.valid ? null : make("span", {class: "bad"}, " invalid")),
    make("div", {class: "seen"}, drawing(made.pictures[turn.picture], made.views[turn.view]),
      make("div", {class: "said"},
        make("p", {class: "tokens", "aria-label": "Reply"}, turn.reply.map((text, t) => scale.token(text, turn, t))),
        turn.why ? make("p", {class: "why"}, turn.why) : null,
        make("p", {class: "hint"}, facts))),
    make("details", {}, make("summary", {}, "Prompt"), make("pre", {}, made.prompts[turn.prompt])),
    made.views[turn.view] ? make("details", {}, make("summary", {}, "Observation"), make("pre", {}, made.views[turn.view])) : null);
}
function shorten(text, most) { return text.length > most ? `${text.slice(0, most)}…` : text; }

function lastState(made, episode) {
  const picture = made.pictures[episode.picture];
  return picture || made.views[episode.view] ? make("li", {}, make("article", {class: "turn end"}, make("h3", {}, `The end: ${wonOrLost(episode)}`),
    drawing(picture, made.views[episode.view]) || make("pre", {}, made.views[episode.view]))) : null;
}

// Tokens get a colour, and for readers who do not see colours their number in a title and an accessible description.
function colourScale(made, by) {
  const valueOf = (turn, t) => by === "logprobs" ? turn.logprobs[t]
    : by === "ratio" ? (isNumber(turn.trained_logprobs?.[t]) ? Math.exp(turn.trained_logprobs[t] - turn.logprobs[t]) : null) : by === "advantage" ? turn.advantage ?? null : null;
  const size = Math.max(highest(made.groups.flatMap((group) => group.episodes.flatMap((episode) => episode.turns.map((turn) => Math.abs(turn.advantage || 0))))), 1e-6);
  const position = (value) => by === "logprobs" ? Math.max(-1, value / 3) : by === "ratio" ? Math.max(-1, Math.min(1, Math.log(value) / Math.log(1.5))) : Math.max(-1, Math.min(1, value / size));
  const titles = {logprobs: "from sure (plain) to surprising (orange: log-prob −3 and less)", ratio: "green: likelier now than when it was sampled, orange: less likely, both up to 1.5 times", advantage: `green: better than its baseline, orange: worse, up to ${size.toFixed(2)}`};
  return {
    legend: by ? make("p", {class: "hint"}, `Colours: ${titles[by]}.`) : null,
    token(text, turn, t) {
      const value = valueOf(turn, t), shown = text.replace(/\n/g, "⏎\n");
      if (value === null || value === undefined) return make("span", {class: "token"}, shown);
      const at = position(value), strength = Math.round(70 * Math.abs(at));
      const details = `${by === "logprobs" ? "log-prob" : by} ${number(value)}` + (by === "logprobs" && turn.trained_logprobs ? `, ${number(turn.trained_logprobs[t])} at training` : "");
      return make("span", {class: "token", title: details, style: `background:color-mix(in srgb, var(--${at < 0 ? "loss" : "gain"}) ${strength}%, transparent)`}, shown);
    },
  };
}

function movesAre(count) { return count === 1 ? "move is" : `${count} moves are`; }

// Two episodes of one group: the moves they share once, then both side by side from where they differ.
function sideBySide(made, group, one, two, scale, run) {
  const [left, right] = [group.episodes[one], group.episodes[two]];
  let shared = 0;
  const fewest = Math.min(left.turns.length, right.turns.length), alike = () => left.turns.length === right.turns.length ? "All their moves are the same." : `Their first ${movesAre(shared)} the same; then one of them ends.`;
  while (shared < fewest && left.turns[shared].state === right.turns[shared].state && left.turns[shared].action === right.turns[shared].action) shared += 1;
  const column = (episode, name) => make("div", {class: "column"}, make("h3", {class: `outcome ${wonOrLost(episode)}`}, `${name}: ${wonOrLost(episode)}`),
    make("ol", {class: "turns", start: shared + 1}, episode.turns.slice(shared).map((_, i) => make("li", {}, turnCard(made, group, episode, shared + i, scale, run))), lastState(made, episode)));
  return make("div", {},
    make("p", {class: "parting"}, shared === fewest ? alike() : shared === 0 ? "They part at their first move." : `Their first ${movesAre(shared)} the same; they part at move ${shared + 1}.`),
    shared ? make("details", {}, make("summary", {}, `The ${counted(shared, "move")} they share`), make("ol", {class: "turns"}, left.turns.slice(0, shared).map((_, i) => make("li", {}, turnCard(made, group, left, i, scale, run))))) : null,
    make("div", {class: "beside"}, column(left, `Episode ${one + 1}`), column(right, `Episode ${two + 1}`)));
}
