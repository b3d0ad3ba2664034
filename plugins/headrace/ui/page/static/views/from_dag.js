/** The page inside a DAG or a DAG run of Airflow: finds its stream, and the batch of the run. */

import { get } from "../core/api.js";
import { html, useEffect, useState } from "../core/html.js";
import { href } from "../core/router.js";
import { Link } from "../parts/link.js";
import { Empty, Loading, Problem } from "../parts/messages.js";

/** @param {{dag: string, run: string | null}} props */
export function FromDag({ dag, run }) {
  const [state, setState] = useState({ found: /** @type {any} */ (undefined), error: null });
  useEffect(() => { find(); }, [dag, run]);
  async function find() {
    try {
      const found = await get(`dags/${encodeURIComponent(dag)}`, { run_id: run });
      setState({ found, error: null });
      if (found.stream) location.replace(href(["streams", found.stream, ...(found.batch_time ? ["batches", found.batch_time] : [])]));
    } catch (error) {
      setState(error.status === 404 ? { found: { stream: null }, error: null } : { found: undefined, error });
    }
  }
  if (state.error) return html`<h1>${dag}</h1><${Problem} error=${state.error} refresh=${find} />`;
  if (state.found === undefined || state.found.stream) return html`<h1>${dag}</h1><${Loading} what="the stream of this DAG" />`;
  return html`<h1>${dag}</h1><${Empty} title="This DAG belongs to no stream of headrace">
    <p><code>${dag}</code> is neither the receiver DAG nor the batch DAG of a stream, or the stream has not run yet.</p>
    <${Link} to=${["streams"]}>All streams</${Link}></${Empty}>`;
}
