/** Where each batch's time went: one column for each batch, of its phases. */

import { html, useMemo, useRef } from "../core/html.js";
import { duration, localTime } from "../core/format.js";
import { now } from "../core/api.js";
import { colour } from "../core/theme_colours.js";
import { ChartFigure } from "./chart_figure.js";
import { sharedOptions, topOf, uPlot } from "./timeline.js";
import { UplotChart } from "./uplot_chart.js";

export const PHASES = [
  ["waiting", "waiting for its run and for blocks"],
  ["starting", "until its newest run began: starting Spark, and runs that failed"],
  ["running", "running: transform and outputs"],
  ["checkpointing", "writing the checkpoint"],
];

/** @param {{title: string, batches: any[], interval: number, onPick: (at: string) => void}} props  batches: oldest first */
export function Phases({ title, batches, interval, onPick }) {
  const readout = useRef(/** @type {HTMLElement | null} */ (null));
  const measured = useMemo(() => batches.filter((each) => each.phases && PHASES.some(([name]) => each.phases[name] != null)), [batches]);
  const data = useMemo(() => {
    const sums = PHASES.map(() => []);
    for (const batch of measured) {
      let sum = 0;
      PHASES.forEach(([name], index) => { sum += batch.phases[name] ?? 0; sums[index].push(sum); });
    }
    // The longest columns first: the shorter ones are drawn over them.
    return [measured.map((each) => Date.parse(each.batch_time) / 1000), ...sums.reverse()];
  }, [measured]);
  const range = useRef(1);
  range.current = topOf([...(data[1] ?? []), interval]);

  const options = () => ({
    ...sharedOptions(duration),
    scales: { x: { time: true, range: (_self, low, high) => [low - interval, high + interval] }, y: { range: () => [0, range.current] } },
    series: [{}, ...[...PHASES].reverse().map(([name]) => ({
      fill: colour(`phase-${name}`), stroke: colour(`phase-${name}`), width: 0, paths: uPlot.paths.bars({ size: [0.8, 24] }), points: { show: false },
    }))],
  });
  const onCursor = (index) => {
    const batch = index == null ? null : measured[index];
    if (readout.current) {
      readout.current.textContent = batch
        ? `${localTime(batch.batch_time, now())}: ${PHASES.filter(([name]) => batch.phases[name]).map(([name]) => `${name} ${duration(batch.phases[name])}`).join(", ")}`
        : "";
    }
  };
  if (!measured.length) return null;
  return html`<${ChartFigure} title=${title} summary=${inWords(measured)} readout=${readout} columns=${PHASES.map(([name]) => name)}
      rows=${() => measured.map((each) => ({ at: each.batch_time, cells: PHASES.map(([name]) => duration(each.phases[name])) }))}>
    <${UplotChart} options=${options} data=${data} remake="phases" onCursor=${onCursor} onPick=${(index) => onPick(measured[index].batch_time)} />
    <ul class="legend">${PHASES.map(([name, meaning]) => html`<li key=${name}><span class=${`swatch ${name}`} aria-hidden="true"></span>${meaning}</li>`)}</ul>
  </${ChartFigure}>`;
}

/** The phase that takes the most time, for a person who sees no chart. @param {any[]} batches */
function inWords(batches) {
  const totals = PHASES.map(([name]) => [name, batches.reduce((sum, each) => sum + (each.phases[name] ?? 0), 0)]);
  const [longest, seconds] = totals.reduce((most, each) => (each[1] > most[1] ? each : most));
  const all = totals.reduce((sum, [, each]) => sum + each, 0);
  return all ? `most of it: ${longest}, ${duration(seconds / batches.length)} a batch (${Math.round((100 * seconds) / all)} %)` : "";
}
