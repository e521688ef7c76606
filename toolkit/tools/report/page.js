"use strict";
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const make = (tag, kind, text) => {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  if (text !== undefined) element.textContent = text;
  return element;
};

// Charts. Their texts and lines take the colours of the page, also when the system turns to dark.
const dark = matchMedia("screen and (prefers-color-scheme: dark)");
const views = [];
const paint = ({ model: plot }) => {
  const colors = getComputedStyle(document.documentElement);
  const [quiet, line] = ["--quiet", "--line"].map((name) => colors.getPropertyValue(name).trim());
  for (const axis of [...plot.below, ...plot.left]) {
    axis.setv({ axis_line_color: line, major_tick_line_color: line, minor_tick_line_color: null,
      major_label_text_color: quiet, axis_label_text_color: quiet });
  }
  for (const grid of plot.center) if (grid.grid_line_color !== undefined) grid.grid_line_color = line;
};
// Bokeh labels a logarithmic axis of less than two decades evenly, which leaves its lower half without a label.
const label = ({ left: [axis], y_range }) => {
  const own = axis.ticker;
  const choose = () => {
    const { start, end } = y_range;
    const powers = [0, 1, 2, 3].map((more) => 10 ** (Math.floor(Math.log10(start)) + more));
    const ticks = powers.flatMap((power) => [power, 2 * power, 5 * power]).filter((tick) => start <= tick && tick <= end);
    axis.ticker = ticks.length > 2 && end < 1000 * start ? new (Bokeh.Models.get("FixedTicker"))({ ticks }) : own;
  };
  if (own.type !== "LogTicker") return;
  y_range.change.connect(choose);
  choose();
};
const draw = async (item, place) => {
  const [view] = (await Bokeh.embed.embed_item(item, place)).roots;
  views.push(view);
  paint(view);
  label(view.model);
};
dark.addEventListener("change", () => views.forEach(paint));
// A print has the colours of paper. It is taken at once, so the charts cannot be drawn later, as they are elsewhere.
for (const [event, isPrinted] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => {
    document.documentElement.classList.toggle("printed", isPrinted);
    views.forEach(paint);
    views.forEach((view) => view.paint());
  });
}
// All are drawn, as nobody scrolls for a printer or a screen reader; one after the other, so that the page opens at once.
const drawAll = async () => {
  for (const [place, item] of Object.entries(read("data-charts"))) {
    await draw(item, document.getElementById(place));
    await new Promise((next) => setTimeout(next));
  }
};
drawAll();

// Predictions: searched, sorted, and shown a few at a time. Every text is put in as text.
const SHOWN_AT_ONCE = 20;
const predictions = read("data-predictions");
const showPredictions = () => {
  const { rows, columns } = predictions;
  const [search, order, list, count, more] = ["search", "order", "rows", "count", "more"].map((id) => document.getElementById(id));
  const searched = rows.map((row) => [row.id, row.source, row.reference, ...row.texts].join("\n").toLowerCase());
  let found = [];
  let numShown = 0;

  // Controls that reorder a line are shown by their number, as in the terminal.
  const visible = (text) => text.replace(/[\u202a-\u202e\u2066-\u2069]/g, (found) => `\\u${found.charCodeAt(0).toString(16)}`);
  const highlighted = (text, words) => {
    const box = make("div", "text");
    box.dir = "auto";
    const lower = text.toLowerCase();
    const usable = words && lower.length === text.length; // some letters change their length
    for (let start = 0; start <= text.length; ) {
      const place = usable ? lower.indexOf(words, start) : -1;
      if (place < 0) { box.append(text.slice(start)); break; }
      box.append(text.slice(start, place), make("mark", "", text.slice(place, place + words.length)));
      start = place + words.length;
    }
    return box;
  };
  const part = (label, text, words) => {
    const box = make("div");
    box.append(make("div", "label", label));
    box.append(text ? highlighted(visible(text), words) : make("div", "quiet", text === null ? "not known" : "empty"));
    return box;
  };
  const showRow = (row, words) => {
    const card = make("article", "card");
    card.append(make("h3", "isolated", `Row ${row.id}`));
    const texts = make("div", "texts");
    texts.append(part("source", row.source, words), part("reference", row.reference, words));
    row.texts.forEach((text, i) => {
      const scores = Object.entries(row.scores[i]).map(([name, value]) => `${name} ${value.toFixed(1)}`).join(" · ");
      const box = part(columns[i], text, words);
      if (scores) box.append(make("div", "label", scores));
      texts.append(box);
    });
    card.append(texts);
    return card;
  };
  const showMore = () => {
    const words = search.value.trim().toLowerCase();
    const next = found.slice(numShown, numShown + SHOWN_AT_ONCE);
    list.append(...next.map((i) => showRow(rows[i], words)));
    numShown += next.length;
    count.textContent = `${numShown.toLocaleString("en")} of ${found.length.toLocaleString("en")} rows`;
    more.hidden = numShown >= found.length;
  };
  const value = (row, [how, name, column]) => {
    const score = (i) => (row.scores[i] ?? {})[name] ?? NaN;
    return how === "gain" ? score(columns.length - 1) - score(0) : score(Number(column));
  };
  const update = () => {
    const words = search.value.trim().toLowerCase();
    const key = order.value ? JSON.parse(order.value) : null;
    found = rows.map((_, i) => i).filter((i) => !words || searched[i].includes(words));
    if (key) {
      const sign = key[3] === "down" ? -1 : 1;
      const last = (number) => (Number.isNaN(number) ? Infinity : sign * number);
      const keys = rows.map((row) => last(value(row, key)));
      found.sort((a, b) => (keys[a] < keys[b] ? -1 : keys[a] > keys[b] ? 1 : a - b));
    }
    list.replaceChildren();
    numShown = 0;
    showMore();
  };
  let timer;
  search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(update, 150); });
  order.addEventListener("change", update);
  more.addEventListener("click", () => {
    const first = numShown;
    showMore();
    const heading = list.children[first]?.querySelector("h3");
    if (heading) { heading.tabIndex = -1; heading.focus({ preventScroll: true }); }
  });
  const option = (label, key) => {
    const choice = make("option", "", label);
    choice.value = JSON.stringify(key);
    order.append(choice);
  };
  for (const name of predictions.metrics) {
    columns.forEach((column, i) => {
      option(`${name}, ${column}, lowest first`, ["one", name, i, "up"]);
      option(`${name}, ${column}, highest first`, ["one", name, i, "down"]);
    });
    if (columns.length > 1) {
      option(`${name}, least gained first`, ["gain", name, 0, "up"]);
      option(`${name}, most gained first`, ["gain", name, 0, "down"]);
    }
  }
  update();
};
if (predictions) showPredictions();
