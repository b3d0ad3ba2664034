/** The stream's definition, as the ledger has it. */

import { html } from "../core/html.js";
import { Facts } from "../parts/facts.js";

/** @param {{stream: any}} props */
export function Definition({ stream }) {
  return html`
    <${Facts} facts=${[["Revision", stream.revision], ["Ledger", html`<code>${stream.ledger}</code>`], ["Outputs", stream.outputs.join(", ")]]} />
    <pre class="json" tabindex="0" aria-label="Definition as JSON">${JSON.stringify(stream.definition, null, 2)}</pre>`;
}
