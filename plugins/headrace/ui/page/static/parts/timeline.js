/** One value over time, with its histogram beside it, as on Spark's Streaming page. */

import { html, useMemo, useRef } from "../core/html.js";
import { localTime } from "../core/format.js";
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
    cursor: { sync: { key: "timelines" }, y: false, points: { size: 6 }, drag: { x: false, y: false } },
    axes: [
      { ...axis, size: X_AXIS, space: 70, values: "{HH}:{mm}:{ss}", grid: { show: false } },
      { ...axis, size: 62, space: 26, values: (_self, ticks) => ticks.map(show) },
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
 * }} props
 *   limit: a horizontal line, such as the batch interval
 */
export function Timeline({ title, hint, points, show, limit = null, tone = "line", onPick }) {
  const readout = useRef(/** @type {HTMLElement | null} */ (null));
  const known = useMemo(() => points.map((each) => each.value).filter((each) => each != null), [points]);
  const top = topOf(limit ? [...known, limit.value] : known);
  const range = useRef(top);
  range.current = top;
  const data = useMemo(() => {
    const times = points.map((each) => Date.parse(each.at) / 1000);
    const values = points.map((each) => each.value);
    return limit ? [times, values, times.map(() => limit.value)] : [times, values];
  }, [points, limit?.value]);

  const options = () => {
    const shared = sharedOptions(show);
    return {
      ...shared,
      scales: { x: { time: true }, y: { range: () => [0, range.current] } },
      series: [
        {},
        { stroke: colour(tone), width: 1.5, fill: colour(`${tone}-fill`), points: { size: 3 }, spanGaps: false },
        ...(limit ? [{ stroke: colour("limit"), width: 1.5, dash: [6, 4], points: { show: false } }] : []),
      ],
    };
  };
  const onCursor = (index) => {
    const point = index == null ? null : points[index];
    if (readout.current) readout.current.textContent = point ? `${localTime(point.at, now())}: ${point.value == null ? "not known" : show(point.value)}` : "";
  };
  if (!known.length) {
    return html`<${ChartFigure} title=${title} hint=${hint} summary="no value yet" readout=${readout} columns=${[]} rows=${() => []}>
      <div class="blank">No value in this time</div></${ChartFigure}>`;
  }
  return html`<${ChartFigure} title=${title} hint=${hint} summary=${inWords(known, show, limit)} readout=${readout} columns=${[title]}
      rows=${() => points.map((each) => ({ at: each.at, cells: [each.value == null ? "–" : show(each.value)] }))}>
    <div class="plots">
      <${UplotChart} options=${options} data=${data} remake=${`${tone} ${limit !== null}`} onCursor=${onCursor}
        onPick=${onPick ? (index) => onPick(points[index].at) : undefined} />
      <${Histogram} values=${known} top=${top} tone=${tone} />
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

export { uPlot };
