/**
 * What the page does with Airflow's window, in whose iframe it is shown. Both are of one origin. The iframe's sandbox
 * allows no window and no navigation of the top, so links to Airflow are followed by Airflow's own window.
 */

/** Airflow's window, or null if the page has a window of its own, or is in a foreign one. */
function airflowWindow() {
  try {
    return window.parent !== window && window.parent.document ? window.parent : null;
  } catch {
    return null;
  }
}

/** Keep Airflow's address at the present view, so that a reload or a copied address leads back to it. */
export function mirrorAddress() {
  const airflow = airflowWindow();
  const own = airflow?.location.pathname.match(/^(.*\/plugin\/[^/]+)/);
  if (!airflow || !own || airflow.location.pathname.includes("/dags/")) return;
  airflow.history.replaceState(airflow.history.state, "", own[1] + location.pathname + location.search + location.hash);
}

/**
 * Follow a link out of the page: pages of Airflow in Airflow's window without loading it anew, others in a new tab.
 *
 * @param {MouseEvent} event
 */
export function followOutside(event) {
  const link = /** @type {HTMLAnchorElement} */ (event.currentTarget);
  const airflow = airflowWindow();
  if (!airflow || event.defaultPrevented || event.button !== 0) return;
  event.preventDefault();
  const target = new URL(link.href);
  if (target.origin === location.origin && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
    airflow.history.pushState(null, "", target);
    airflow.dispatchEvent(new PopStateEvent("popstate", { state: null }));
    return;
  }
  const outside = airflow.document.createElement("a");
  outside.href = target.href;
  outside.target = "_blank";
  outside.rel = "noopener noreferrer";
  outside.click();
}

/** The address of Airflow's sign-in, which leads back to where the person is. */
export function signInAddress() {
  const back = airflowWindow()?.location.href ?? location.href;
  return new URL(`../auth/login?next=${encodeURIComponent(back)}`, document.baseURI).href;
}

/** Load Airflow's sign-in in the whole window. */
export function signIn() {
  const airflow = airflowWindow();
  if (!airflow) { location.assign(signInAddress()); return; }
  const link = airflow.document.createElement("a");
  link.href = signInAddress();
  link.click();
}

/** Airflow's theme, "dark" or "light"; null if the page has a window of its own. */
function airflowTheme() {
  const root = airflowWindow()?.document.documentElement;
  if (!root) return null;
  const named = root.dataset.theme ?? "";
  if (root.classList.contains("dark") || named === "dark") return "dark";
  if (root.classList.contains("light") || named === "light") return "light";
  return null;
}

/** Give the document Airflow's theme and follow its changes; else the theme is the system's, by the style sheets. */
export function followTheme() {
  const apply = () => {
    const theme = airflowTheme();
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    dispatchEvent(new Event("themechange"));
  };
  apply();
  const root = airflowWindow()?.document.documentElement;
  if (root) new MutationObserver(apply).observe(root, { attributes: true, attributeFilter: ["class", "data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
}
