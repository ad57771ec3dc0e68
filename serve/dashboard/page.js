// The parts of a page that move: those marked data-live="SECONDS" are fetched again while the page is seen, and each text of
// class "copied" gets a button. Without a script the pages say the same, as it was when they were asked for.
"use strict";
for (const part of document.querySelectorAll("[data-live]")) {
  setInterval(async () => {
    if (document.hidden || part.contains(document.activeElement)) return;
    const answer = await fetch(location.href, { headers: { accept: "text/html" } }).catch(() => null);
    if (!answer || !answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById(part.id);
    if (fresh) part.replaceChildren(...fresh.childNodes);
  }, 1000 * part.dataset.live);
}
for (const text of document.querySelectorAll("pre.copied")) {
  const button = document.createElement("button");
  button.textContent = "Copy";
  button.setAttribute("aria-label", "Copy the text below");
  button.onclick = async () => {
    await navigator.clipboard.writeText(text.textContent);
    button.textContent = "Copied";
  };
  if (navigator.clipboard) text.before(button);
}
