/** How often which value occurs: bars along the vertical axis of the timeline beside it. */

import { html } from "../core/html.js";
import { HEIGHT, TOP, X_AXIS } from "./uplot_chart.js";

const BINS = 12;
const WIDTH = 90;

/** @param {{values: number[], top: number, tone: string}} props  top: the highest value of the axis */
export function Histogram({ values, top, tone }) {
  const bins = new Array(BINS).fill(0);
  for (const value of values) bins[Math.min(BINS - 1, Math.max(0, Math.floor((value / top) * BINS)))] += 1;
  const most = Math.max(...bins, 1);
  const plot = HEIGHT - TOP - X_AXIS, step = plot / BINS;
  return html`<svg class="histogram" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} width=${WIDTH} height=${HEIGHT} aria-hidden="true">
    <path class="axis" d=${`M.5 ${TOP}v${plot}`} />
    ${bins.map((number, bin) => (number ? html`<rect key=${bin} class=${`bar ${tone}`} x="1" y=${TOP + plot - (bin + 1) * step + 0.5}
      height=${step - 1} width=${Math.max(2, (number / most) * (WIDTH - 24))} />` : null))}
    <text x="2" y=${HEIGHT - 8}>up to ${most}</text>
  </svg>`;
}
