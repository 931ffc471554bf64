// Runs side by side: results, and the fields in which their configs differ.

SECTIONS.runs = {
  drawn: false,
  show() {
    if (this.drawn) return;
    this.drawn = true;
    const of = (one, name) => one ? `${percent(one.success_rate)} [${percent(one.low)}, ${percent(one.high)}]` : "–";
    const rows = DATA.runs.map((run) => [run.name, run.world, creditOf(run), Math.max(0, highest(Object.values(run.policies).flatMap((one) => one.step))),
      of(run.evaluations[0]), of(run.evaluations.length > 1 ? run.evaluations.at(-1) : null), duration(run.spent.wall_s), run.config.seed ?? "–"]);
    const target = make("div", {});
    const search = make("input", {type: "search", placeholder: "name of a field", oninput: () => draw(search.value)});
    const draw = (words) => {
      const fields = Object.keys(DATA.runs[0].config).filter((field) => field.includes(words)).slice(0, 400);
      replace(target, table(["Field", ...DATA.runs.map((run) => run.name)], fields.map((field) => [field, ...DATA.runs.map((run) => String(run.config[field] ?? "–"))]), "Config"));
    };
    replace(document.getElementById("section-runs"), make("h2", {}, "Runs"), table(["Run", "World", "Credit", "Steps", "Held out, first", "Held out, last", "Wall time", "Seed"], rows, "Runs"),
      DATA.runs.length > 1 ? [make("h2", {}, "Fields in which they differ"), DATA.differences.length
        ? table(["Field", ...DATA.runs.map((run) => run.name)], DATA.differences.map(({field, values}) => [field, ...values.map(String)]), "Differences") : make("p", {}, "None but the name.")] : null,
      make("h2", {}, "Config"), make("label", {class: "field"}, make("span", {}, "Fields with"), search), target);
    draw("");
  },
};
