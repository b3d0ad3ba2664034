/** A uPlot chart as a component: made once, then given new data, so that it does not flicker and keeps its cursor. */

import { html, useEffect, useLayoutEffect, useRef, useState } from "../core/html.js";

const uPlot = /** @type {any} */ (globalThis).uPlot;
export const HEIGHT = 132;
export const TOP = 6;
export const X_AXIS = 24;

/** Counts the changes of the theme: charts are made again with other colours. */
export function useThemeChanges() {
  const [changes, setChanges] = useState(0);
  useEffect(() => {
    const follow = () => setChanges((old) => old + 1);
    addEventListener("themechange", follow);
    return () => removeEventListener("themechange", follow);
  }, []);
  return changes;
}

/**
 * @param {{
 *   options: () => any, data: (number | null)[][], remake: string,
 *   onCursor?: (index: number | null) => void, onPick?: (index: number) => void,
 * }} props
 *   options: uPlot's, without size; called when the chart is made.
 *   remake: the chart is made again when this changes.
 */
export function UplotChart({ options, data, remake, onCursor, onPick }) {
  const place = useRef(/** @type {HTMLDivElement | null} */ (null));
  const chart = useRef(/** @type {any} */ (null));
  const theme = useThemeChanges();
  const newest = useRef({ data, onCursor, onPick });
  newest.current = { data, onCursor, onPick };

  useLayoutEffect(() => {
    const root = place.current;
    const made = new uPlot({
      width: Math.max(root.clientWidth, 120), height: HEIGHT, legend: { show: false }, padding: [TOP, 22, 0, 0],
      ...options(),
      hooks: { setCursor: [(self) => newest.current.onCursor?.(self.cursor.idx ?? null)] },
    }, newest.current.data, root);
    made.over.addEventListener("click", () => {
      if (made.cursor.idx != null) newest.current.onPick?.(made.cursor.idx);
    });
    chart.current = made;
    const sized = new ResizeObserver(() => {
      const width = root.clientWidth;
      if (width > 0 && width !== made.width) made.setSize({ width, height: HEIGHT });
    });
    sized.observe(root);
    return () => { sized.disconnect(); made.destroy(); chart.current = null; };
  }, [remake, theme]);

  useLayoutEffect(() => { if (chart.current && chart.current.data !== data) chart.current.setData(data); }, [data]);
  return html`<div class=${`canvas${onPick ? " pickable" : ""}`} aria-hidden="true" ref=${place}></div>`;
}
