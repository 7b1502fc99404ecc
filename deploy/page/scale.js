// The colours of a canvas: ten shades of viridis (see page.css), even in lightness and told apart by colour-blind
// readers. Hover and focus say the numbers, so that no one depends on them.

const NUM_SHADES = 10;

/** The class of a share from 0 to 1. */
export function shadeOf(share) {
  return `shade-${Math.min(NUM_SHADES - 1, Math.floor(Math.max(0, share) * NUM_SHADES))}`;
}
