/** A state as an icon, a word and a colour. Each state has an icon of its own shape: the colour is never needed. */

import { html } from "../core/html.js";
import { words } from "../core/format.js";

/** The order in which a person wants to see them: the worst first. */
export const WORST_FIRST = ["failing", "stalled", "paused", "falling_behind", "starting", "stopped", "well"];

/** Icon and tone of each state of a stream, a receiver, the receiver job, a batch, an attempt or an output. */
const LOOKS = {
  well: ["check", "good"], completed: ["check", "good"], running: ["play", "active"], live: ["check", "good"], active: ["check", "good"],
  assigned: ["check", "good"], reading: ["check", "good"], succeeded: ["check", "good"], written: ["check", "good"],
  falling_behind: ["slope", "warning"], paused: ["bars", "warning"], late: ["slope", "warning"], queued: ["clock", "calm"],
  stalled: ["hand", "bad"], failing: ["cross", "bad"], failed: ["cross", "bad"], lost: ["cross", "bad"], error: ["cross", "bad"],
  "lease lost": ["cross", "bad"], dead: ["cross", "bad"], expired: ["cross", "bad"],
  abandoned: ["slash", "warning"], absorbed: ["merge", "calm"], ended: ["square", "calm"], stopping: ["clock", "calm"], fenced: ["slash", "calm"],
  stopped: ["square", "calm"], scheduled: ["clock", "calm"], starting: ["clock", "active"], allocated: ["clock", "active"], open: ["clock", "calm"],
};
const SHAPES = {
  check: html`<path d="M3 8.5l3.2 3.2L13 4.8" />`,
  cross: html`<path d="M4 4l8 8M12 4l-8 8" />`,
  slope: html`<path d="M2 4l4 4 3-2 5 6M14 8.5V12h-3.5" />`,
  hand: html`<path d="M5.2 1.8h5.6l3.4 3.4v5.6l-3.4 3.4H5.2l-3.4-3.4V5.2zM8 4.6v4M8 11.2v.2" />`,
  bars: html`<path d="M5.5 3.5v9M10.5 3.5v9" />`,
  square: html`<path d="M4 4h8v8H4z" />`,
  clock: html`<circle cx="8" cy="8" r="6" /><path d="M8 4.8V8l2.3 1.6" />`,
  play: html`<path d="M5 3l8 5-8 5z" />`,
  slash: html`<circle cx="8" cy="8" r="6" /><path d="M4 12l8-8" />`,
  merge: html`<path d="M3 3l5 5v5M13 3L8 8M5.8 11L8 13.2 10.2 11" />`,
  dot: html`<circle cx="8" cy="8" r="3" />`,
};

/** @param {{state: string, large?: boolean}} props */
export function StateBadge({ state, large = false }) {
  const [shape, tone] = LOOKS[state] ?? ["dot", "calm"];
  return html`<span class=${`badge ${tone}${large ? " large" : ""}`} data-state=${state}>
    <svg viewBox="0 0 16 16" aria-hidden="true">${SHAPES[shape]}</svg>${words(state)}
  </span>`;
}
