// The last 15 minutes as charts. uPlot draws them; it is a classic script, so it is a global.

import { byId, each, make, setText } from "./dom.js";
import { bytes, duration, percent, rate } from "./format.js";
import { ask } from "./source.js";

/** The time between two requests, in milliseconds: as long as a point takes. */
const EACH = 5_000;

const HEIGHT = 150;

/** The distances between marks on an axis of bytes: powers of two, for round numbers of KiB. */
const POWERS = Array.from({ length: 50 }, (_, power) => 2 ** power);

/** The charts: their title, how values are shown, and their lines from the history and the hosts. */
const CHARTS = [
  {
    title: "Time per step",
    format: duration,
    lines: (all) => [{ label: "slowest rank", values: all.step_seconds }],
    none: "No rank counts steps yet.",
  },
  {
    title: "Others wait for",
    format: percent,
    lines: (all) => all.ranks.map((it) => ({ label: `rank ${it.rank}`, values: it.waited })),
    none: "No rank waits for another.",
  },
  {
    title: "Blocked in waits",
    format: percent,
    lines: (all) => [{ label: "mean of all ranks", values: all.blocked }],
    none: "No rank has reported yet.",
  },
  {
    title: "Operations per second",
    format: (value) => value.toFixed(value > 0 && value < 10 ? 1 : 0),
    lines: (all) => [{ label: "busiest host", values: all.operations_per_second }],
    none: "No host has reported yet.",
  },
  {
    title: "Traffic of links",
    format: rate,
    lines: (all, host) =>
      all.links.map((it) => ({
        label: `${host(it.from)} to ${host(it.to)}`,
        values: it.bytes_per_second,
      })),
    none: "No traffic between hosts.",
  },
  {
    title: "Memory of the daemons",
    format: bytes,
    lines: (all) => [
      { label: "in RAM", values: all.resident_bytes },
      { label: "shared with ranks", values: all.shared_bytes },
    ],
    none: "No host has reported yet.",
  },
];

/** The value of a CSS variable of the page, which depends on the color scheme. */
const color = (name) => getComputedStyle(document.body).getPropertyValue(name).trim();

/** The time before now, on the axis. */
const ago = (seconds) => (seconds === 0 ? "now" : `${(-seconds / 60).toFixed(0)} min`);

/** One chart: its title, its legend, and the picture. */
class Chart {
  constructor(chart) {
    this.chart = chart;
    this.legend = make("ul", "legend");
    this.none = make("p", "legend");
    this.place = make("div", "plot");
    this.place.setAttribute("role", "img");
    this.element = make("figure", "", make("figcaption", "", chart.title), this.legend);
    this.element.append(this.none, this.place);
    this.labels = "";
    new ResizeObserver(() => this.resize()).observe(this.place);
  }

  resize() {
    const width = this.place.clientWidth;
    if (this.plot && width > 0 && width !== this.plot.width) {
      this.plot.setSize({ width, height: HEIGHT });
    }
  }

  /** Shows a history. `times` are negative: seconds before its end. */
  show(all, times, host) {
    const lines = this.chart.lines(all, host).filter((it) => it.values.some((one) => one > 0));
    setText(this.none, lines.length ? "" : this.chart.none);
    this.none.hidden = lines.length > 0;
    this.place.hidden = !lines.length;
    this.lines = lines;
    this.showLegend(times.length - 1);
    if (!lines.length) return;
    const labels = lines.map((line) => line.label).join("\n");
    const data = [times, ...lines.map((line) => line.values)];
    if (labels !== this.labels) {
      this.labels = labels;
      this.plot?.destroy();
      this.plot = new uPlot(this.options(), data, this.place);
    } else {
      this.plot.setData(data);
    }
    this.place.setAttribute("aria-label", this.inWords());
  }

  /** The legend, with the values of one point. */
  showLegend(at) {
    const create = () => make("li", "", make("i"), make("span"));
    each(this.legend, this.lines, create, (item, { label, values }, number) => {
      item.firstElementChild.className = `series-${number + 1}`;
      const value = values[at];
      setText(item.lastElementChild, `${label}: ${value == null ? "—" : this.chart.format(value)}`);
    });
  }

  /** The chart for those who can't see it. */
  inWords() {
    const { format, title } = this.chart;
    const line = ({ label, values }) => {
      const known = values.filter((value) => value != null);
      const [least, most] = [Math.min(...known), Math.max(...known)].map(format);
      return `${label}: ${format(known.at(-1))} now, ${least} to ${most} before`;
    };
    return `${title}. ${this.lines.map(line).join("; ")}.`;
  }

  options() {
    const { format } = this.chart;
    const axis = {
      stroke: () => color("--faint"),
      font: "12px system-ui, sans-serif",
      grid: { stroke: () => color("--line"), width: 0.5 },
      ticks: { show: false },
    };
    const series = this.lines.map(({ label }, at) => ({
      label,
      stroke: () => color(`--series-${at + 1}`),
      // Lines also differ in their dashes.
      dash: at % 2 ? [6, 3] : [],
      width: 2,
      points: { show: false },
    }));
    return {
      width: this.place.clientWidth || 300,
      height: HEIGHT,
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, points: { size: 6 } },
      scales: {
        x: { time: false, range: (_, least) => [Math.min(least, -60), 0] },
        y: { range: (_, __, most) => [0, most > 0 ? most * 1.1 : 1] },
      },
      axes: [
        { ...axis, size: 28, space: 70, values: (_, splits) => splits.map(ago), incrs: [60, 180, 300] },
        {
          ...axis,
          size: 78,
          space: 40,
          values: (_, splits) => splits.map(format),
          ...([bytes, rate].includes(format) ? { incrs: POWERS } : {}),
        },
      ],
      series: [{}, ...series],
      hooks: {
        setCursor: [(plot) => this.showLegend(plot.cursor.idx ?? plot.data[0].length - 1)],
      },
    };
  }
}

let charts = null;
let due = 0;
let isOver = false;

/** Asks for the history if it is time for that, and shows it. `nodes` have the names of hosts. */
export async function showCharts({ nodes, failure, phase }) {
  if (isOver || Date.now() < due) return;
  // After the end the server may be gone, and the charts stay as they are.
  isOver = Boolean(failure) || phase === "finished";
  due = Date.now() + EACH;
  let all;
  try {
    all = await ask("/api/v1/history");
  } catch {
    // The watched snapshots tell why.
    return;
  }
  if (!charts) {
    charts = CHARTS.map((chart) => new Chart(chart));
    byId("charts").append(...charts.map((chart) => chart.element));
    // Colors are read when a chart is drawn.
    const redraw = () => charts.forEach((chart) => chart.plot?.redraw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  }
  const end = all.seconds.at(-1) ?? 0;
  const times = all.seconds.map((at) => at - end);
  const host = (at) => nodes[at]?.host ?? `${at}`;
  charts.forEach((chart) => chart.show(all, times, host));
  setText(byId("charts-legend"), legend(all));
}

function legend({ seconds, point_seconds: each, most_points: most }) {
  const minutes = Math.round((each * most) / 60);
  return seconds.length
    ? `Each point is the mean of ${each} seconds. At most ${minutes} minutes are kept.`
    : `The first point is here after ${each} seconds.`;
}
