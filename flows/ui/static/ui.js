"use strict";
// The pages work without this. `data-key` is the key that focuses a field or presses a button.
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  for (const element of document.querySelectorAll("[data-key]")) {
    if (!element.dataset.key.split(" ").includes(event.key)) continue;
    event.preventDefault();
    if (element.matches("input")) element.focus();
    else element.click();
    return;
  }
});
// A part of a page that the server sends again whenever it changes. The browser reconnects by itself.
for (const part of document.querySelectorAll("[data-events]")) {
  const source = new EventSource(part.dataset.events);
  source.addEventListener("stages", (event) => { part.innerHTML = event.data; });
  source.addEventListener("over", () => { source.close(); location.reload(); });
}
