/** A text of the API. The times in it are UTC; they are shown as all others. */

import { html } from "../core/html.js";
import { Time } from "./time.js";

const ISO = /(\d{4}-\d\d-\d\dT\d\d:\d\d(?::\d\d(?:\.\d+)?)?Z)/;

/** @param {{text: string | null}} props */
export function Words({ text }) {
  return (text ?? "").split(ISO).map((part, index) => (index % 2 ? html`<${Time} key=${index} at=${part} />` : part));
}
