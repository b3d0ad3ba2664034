/** One value over time, with its histogram beside it, as on Spark's Streaming page. */

import { html, useMemo, useRef } from "../core/html.js";
import { ZONE, axisTime, localTime } from "../core/format.js";
import { now } from "../core/api.js";
import { colour } from "../core/theme_colours.js";
import { ChartFigure } from "./chart_figure.js";
import { Histogram } from "./histogram.js";
import { UplotChart, X_AXIS } from "./uplot_chart.js";

const uPlot = /** @type {any} */ (globalThis).uPlot;

/** Settings that all charts of the page share. @param {(value: number) => string} show */
export function sharedOptions(show) {
  const axis = { stroke: colour("quiet"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, font: "11px Inter, system-ui, sans-serif" };
  return {
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), ZONE),
    cursor: { sync: { key: "timelines" }, y: false, points: { size: 6 }, drag: { x: false, y: false } },
    axes: [
      { ...axis, size: X_AXIS, space: 90, values: (self, ticks) => ticks.map((tick) => axisTime(tick, self.scales.x.max - self.scales.x.min)), grid: { show: false } },
      // As wide as the widest label: "16 min 40 s" must not lose its first digit.
      { ...axis, size: (_self, labels) => Math.max(62, 12 + 6.2 * Math.max(0, ...(labels ?? []).map((each) => each.length))), space: 26, values: (_self, ticks) => ticks.map(show) },
    ],
  };
}

/** The top of the vertical axis. @param {number[]} values */
export function topOf(values) {
  const highest = Math.max(0, ...values);
  return highest > 0 ? highest * 1.08 : 1;
}

/**
 * @param {{
 *   title: string, hint?: string, points: {at: string, value: number | null}[], show: (value: number) => string,
 *   limit?: {value: number, name: string} | null, tone?: string, onPick?: (at: string) => void,
 *   spreads?: {whole: any, of: any, parts: any[]} | null,
 * }} props
 *   limit: a horizontal line, such as the batch interval
 *   spreads: where each point stands for several batches, their median, 95th percentile and maximum
 */
export function Timeline({ title, hint, points, show, limit = null, tone = "line", onPick, spreads = null }) {
  const readout = useRef(/** @type {HTMLElement | null} */ (null));
  const of = (name) => spreads.parts.map((each) => each?.[name] ?? null);
  const values = useMemo(() => (spreads ? of("maximum") : points.map((each) => each.value)), [points, spreads]);
  const known = useMemo(() => values.filter((each) => each != null), [values]);
  const top = topOf(limit ? [...known, limit.value] : known);
  const range = useRef(top);
  range.current = top;
  const data = useMemo(() => {
    const times = points.map((each) => Date.parse(each.at) / 1000);
    const lines = spreads ? [values, of("median"), of("p95")] : [values];
    return limit ? [times, ...lines, times.map(() => limit.value)] : [times, ...lines];
  }, [points, values, limit?.value]);

  const options = () => {
    const shared = sharedOptions(show);
    return {
      ...shared,
      scales: { x: { time: true }, y: { range: () => [0, range.current] } },
      series: [
        {},
        { stroke: colour(tone), width: spreads ? 0 : 1.5, fill: colour(`${tone}-fill`), points: { show: spreads ? false : undefined, size: 3 }, spanGaps: false },
        ...(spreads ? [{ stroke: colour(tone), width: 1.5, points: { show: false } }, { stroke: colour(tone), width: 1, dash: [2, 3], points: { show: false } }] : []),
        ...(limit ? [{ stroke: colour("limit"), width: 1.5, dash: [6, 4], points: { show: false } }] : []),
      ],
    };
  };
  const cells = (index) => {
    const spread = spreads?.parts[index];
    if (spreads) return spread ? [`median ${show(spread.median)}`, `p95 ${show(spread.p95)}`, `slowest ${show(spread.maximum)}`] : ["not known"];
    return [points[index].value == null ? "not known" : show(points[index].value)];
  };
  const onCursor = (index) => {
    const point = index == null ? null : points[index];
    if (readout.current) readout.current.textContent = point ? `${localTime(point.at, now())}: ${cells(index).join(", ")}` : "";
  };
  if (!known.length) {
    return html`<${ChartFigure} title=${title} hint=${hint} summary="no value yet" readout=${readout} columns=${[]} rows=${() => []}>
      <div class="blank">No value in this time</div></${ChartFigure}>`;
  }
  return html`<${ChartFigure} title=${title} hint=${hint} summary=${spreads ? allInWords(spreads, show, limit) : inWords(known, show, limit)} readout=${readout}
      columns=${spreads ? ["Median", "95th percentile", "Slowest"] : [title]}
      rows=${() => points.map((each, index) => ({
        at: each.at,
        cells: spreads ? ["median", "p95", "maximum"].map((name) => (spreads.parts[index] ? show(spreads.parts[index][name]) : "–")) : [each.value == null ? "–" : show(each.value)],
      }))}>
    <div class="plots">
      <${UplotChart} options=${options} data=${data} remake=${`${tone} ${limit !== null} ${spreads !== null}`} onCursor=${onCursor}
        onPick=${onPick ? (index) => onPick(points[index].at) : undefined} />
      ${spreads ? null : html`<${Histogram} values=${known} top=${top} tone=${tone} />`}
    </div>
  </${ChartFigure}>`;
}

/** @param {number[]} known @param {(value: number) => string} show @param {{value: number, name: string} | null} limit */
function inWords(known, show, limit) {
  const sorted = [...known].sort((a, b) => a - b);
  const median = sorted[Math.floor((sorted.length - 1) / 2)];
  const above = limit ? known.filter((each) => each > limit.value).length : 0;
  const over = limit ? `; ${above} of ${known.length} above the ${limit.name} of ${show(limit.value)}` : "";
  return `last ${show(known.at(-1))}, median ${show(median)}, highest ${show(sorted.at(-1))}${over}`;
}

/** The same of all batches, as the ledger counts them. @param {{whole: any, of: any}} spreads @param {(value: number) => string} show @param {{value: number, name: string} | null} limit */
function allInWords({ whole, of }, show, limit) {
  const share = whole.above_interval / whole.batches;
  const over = limit ? `; ${whole.above_interval} of ${whole.batches} (${share < 0.1 ? (100 * share).toFixed(1) : Math.round(100 * share)} %) above the ${limit.name} of ${show(limit.value)}` : "";
  return of ? `median ${show(of.median)}, p95 ${show(of.p95)}, highest ${show(of.maximum)}${over}` : "no value yet";
}

export { uPlot };
