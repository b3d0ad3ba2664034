/** Colours for drawing on a canvas, which knows no style sheets. */

/** @param {string} name  a custom property of style/colours.css, without "--" */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
