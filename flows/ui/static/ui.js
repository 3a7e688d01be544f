"use strict";
// The pages work without this. `data-key` is the key that focuses a field or presses a button.
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || event.repeat) return;
  if (event.target.closest("input, select, textarea")) return;
  for (const element of document.querySelectorAll("[data-key]")) {
    if (element.dataset.key !== event.key) continue;
    if (element.matches("button") && document.getElementById("keys")?.checked === false) return;
    event.preventDefault();
    if (element.matches("input")) element.focus();
    else element.click();
    return;
  }
});

// New content of a part of the page; whoever was at a link or a button in it stays at the same one.
const replace = (part, html) => {
  const here = part.contains(document.activeElement) ? document.activeElement : null;
  const same = (element) => element.tagName === here.tagName && element.value === here.value
    && element.getAttribute("href") === here.getAttribute("href");
  part.innerHTML = html;
  if (here) ([...part.querySelectorAll("a, button")].find(same) || part.querySelector("button, a"))?.focus({ preventScroll: true });
};

// A form whose answer replaces a part of the page. What cannot be sent is sent again until the server has it.
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
const sending = new Set();
document.addEventListener("submit", async (event) => {
  const form = event.target.closest("form[data-replaces]");
  if (!form) return;
  event.preventDefault();
  const part = document.getElementById(form.dataset.replaces);
  if (sending.has(part)) return;  // a second key before the next pair is there is about a pair that nobody has seen
  sending.add(part);
  const body = new URLSearchParams(new FormData(form, event.submitter));
  const notice = (text) => { form.querySelector(".notice").textContent = text; };
  for (;;) {
    try {
      const answer = await fetch(form.action, { method: "POST", body, headers: { "X-Fragment": "1" } });
      const text = await answer.text();
      if (answer.ok) replace(part, text);
      else if (answer.status === 403) notice("not saved: sign in again, in another tab, and answer once more");
      else notice(`not saved: ${text}`);
      if (answer.status < 500) break;
    } catch (error) {
      notice("not saved yet: the server does not answer; trying again");
    }
    await pause(500);
  }
  sending.delete(part);
});
window.addEventListener("beforeunload", (event) => { if (sending.size) event.preventDefault(); });

// Parts of a page that the server sends again whenever they change. The browser reconnects by itself.
for (const part of document.querySelectorAll("[data-events]")) {
  const source = new EventSource(part.dataset.events);
  for (const name of ["stages", "samples"]) {
    source.addEventListener(name, (event) => replace(document.getElementById(name), event.data));
  }
  source.addEventListener("over", () => { source.close(); location.reload(); });
}
