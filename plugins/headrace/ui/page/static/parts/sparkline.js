/** The last values as a small line; in words for who does not see it. */

import { html } from "../core/html.js";

const WIDTH = 68;
const HEIGHT = 22;

/** @param {{values: (number | null)[], name: string, show: (value: number) => string, tone?: string}} props */
export function Sparkline({ values, name, show, tone = "line" }) {
  const known = values.filter((each) => each != null);
  if (known.length < 2) return null;
  const top = Math.max(...known, 0) || 1, step = WIDTH / (values.length - 1);
  let path = "", pen = "M";
  values.forEach((value, index) => {
    if (value == null) { pen = "M"; return; }
    path += `${pen}${(index * step).toFixed(1)} ${(HEIGHT - 2 - (value / top) * (HEIGHT - 4)).toFixed(1)}`;
    pen = "L";
  });
  const text = `${name}: last ${show(known.at(-1))}, lowest ${show(Math.min(...known))}, highest ${show(Math.max(...known))}`;
  return html`<svg class=${`sparkline ${tone}`} viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} width=${WIDTH} height=${HEIGHT} role="img" aria-label=${text}>
    <title>${text}</title><path d=${path} />
  </svg>`;
}
