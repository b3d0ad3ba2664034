/** What is shown instead of data: nothing there, not yet there, or an error with what to do. */

import { html } from "../core/html.js";
import { signIn } from "../core/airflow_frame.js";

/** @param {{what: string}} props */
export function Loading({ what }) {
  return html`<div class="message loading" role="status"><span class="spinner" aria-hidden="true"></span>Loading ${what} …</div>`;
}

/** @param {{title: string, children?: any}} props */
export function Empty({ title, children }) {
  return html`<div class="message empty"><strong>${title}</strong>${children ? html`<div>${children}</div>` : null}</div>`;
}

const TITLES = {
  0: "headrace's API cannot be reached",
  401: "You are signed out",
  403: "Not permitted",
  404: "Not found",
  503: "Not available at the moment",
};

/**
 * @param {{error: import("../core/api.js").ApiError, refresh?: () => void, stale?: boolean}} props
 *   stale: older data are still shown below
 */
export function Problem({ error, refresh, stale = false }) {
  const title = TITLES[error.status] ?? `The API answered ${error.status}`;
  return html`<div class="message problem" role="alert">
    <strong>${title}</strong>
    <div>${error.status === 401 ? "Airflow's session has ended. Sign in again, and you come back to this view." : error.message}</div>
    ${error.remedy ? html`<div><b>What to do:</b> ${error.remedy}</div>` : null}
    ${stale ? html`<div class="quiet">What you see below is older.</div>` : null}
    <div class="buttons">
      ${error.status === 401 ? html`<button type="button" class="primary" onClick=${signIn}>Sign in again</button>` : null}
      ${refresh ? html`<button type="button" onClick=${refresh}>Try again</button>` : null}
    </div>
  </div>`;
}

/**
 * The data's view, or what is shown instead.
 *
 * @param {{polled: import("../core/polling.js").Polled, what: string, children: (data: any) => any}} props
 */
export function WithData({ polled, what, children }) {
  const { data, error, refresh } = polled;
  if (data === null) return error ? html`<${Problem} error=${error} refresh=${refresh} />` : html`<${Loading} what=${what} />`;
  // A 401 or 404 says that the caller may no longer see it.
  if (error && [401, 403, 404].includes(error.status)) return html`<${Problem} error=${error} refresh=${refresh} />`;
  return html`${error ? html`<${Problem} error=${error} refresh=${refresh} stale />` : null}${children(data)}`;
}
