// Prompt lookup: what followed the last time the text ended like this?

const MIN_MATCH = 2;
const MAX_MATCH = 64; // a longer match would not make the draft any longer

/** {length, next}: the longest earlier match of the text's end, the latest of equals, and the position behind it. */
function lastMatch(text) {
  const best = { length: 0, next: 0 };
  for (let end = text.length - 1; end >= 1; end -= 1) {
    let length = 0;
    while (length < Math.min(end, MAX_MATCH) && text[end - 1 - length] === text[text.length - 1 - length]) length += 1;
    if (length > best.length) Object.assign(best, { length, next: end });
    if (length === MAX_MATCH) break;
  }
  return best;
}

/** Copies what followed the match, at most twice as many ids as matched. */
export function guess(session, assumed, wanted) {
  const text = [...session.ids, ...assumed];
  const room = session.opening.max_length - text.length;
  const most = Math.min(wanted, room);
  const { length, next } = lastMatch(text);
  if (length < MIN_MATCH || most < 1) return { ids: [], end: "DRAFT_END_NO_MATCH" };
  const start = text.length;
  const limit = Math.min(most, 2 * length);
  for (let i = 0; i < limit; i += 1) {
    text.push(text[next + i]); // may run on into what it copied itself: a period goes on
    if (session.endIds.has(text.at(-1))) return { ids: text.slice(start), end: "DRAFT_END_END_TOKEN" };
  }
  const end = limit < most ? "DRAFT_END_LOW_CONFIDENCE" : "DRAFT_END_MAX_DRAFT_TOKENS";
  return { ids: text.slice(start), end };
}
