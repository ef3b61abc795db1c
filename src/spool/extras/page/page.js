// Renews the page without losing the reader's place, and says so when nobody writes it any more.
(function () {
  "use strict";
  var html = document.documentElement;
  var key = "spool:" + location.pathname;
  var skew = 0; // of this clock against the server's, where one tells
  var timer;
  var web = location.protocol === "http:" || location.protocol === "https:";

  function number(name) { return Number(html.dataset[name]); }

  function ago(seconds) {
    if (seconds < 90) return Math.round(seconds) + " s ago";
    if (seconds < 5400) return Math.round(seconds / 60) + " min ago";
    if (seconds < 129600) return Math.round(seconds / 3600) + " h ago";
    return Math.round(seconds / 86400) + " days ago";
  }

  function show() {
    var age = Math.max(0, (Date.now() + skew - number("written")) / 1000);
    var stale = number("fresh") > 0 && age > number("fresh");
    html.classList.toggle("stale", stale);
    document.querySelectorAll(".age").forEach(function (each) { each.textContent = ago(age); });
  }

  function keep() {
    try { sessionStorage.setItem(key, String(scrollY)); } catch (error) { /* without, it begins at its top */ }
  }

  function place() {
    try {
      var y = sessionStorage.getItem(key);
      sessionStorage.removeItem(key);
      if (y !== null) scrollTo(0, Number(y));
    } catch (error) { /* likewise */ }
  }

  function swap(text) {
    var other = new DOMParser().parseFromString(text, "text/html");
    var next = other.documentElement;
    if (!next.dataset.written || next.dataset.written === html.dataset.written) return;
    if (next.dataset.look !== html.dataset.look) { keep(); location.reload(); return; }
    ["written", "fresh", "every"].forEach(function (name) { html.dataset[name] = next.dataset[name]; });
    document.title = other.title;
    document.body.replaceWith(document.adoptNode(other.body));
  }

  function busy() {
    var selected = getSelection();
    return document.hidden || (selected !== null && !selected.isCollapsed);
  }

  function renew() {
    if (busy()) return again();
    if (!web) { keep(); location.reload(); return undefined; }
    return fetch(location.href, { cache: "no-store" }).then(function (answer) {
      var there = Date.parse(answer.headers.get("Date") || "");
      if (there) skew = Math.abs(there - Date.now()) > 2000 ? there - Date.now() : 0;
      return answer.ok ? answer.text().then(swap) : undefined;
    }).catch(function () { /* the server may be back later; until then the page grows old */ }).then(function () {
      show();
      again();
    });
  }

  function again() {
    clearTimeout(timer);
    timer = setTimeout(renew, number("every") * (web ? 1000 : 2000)); // a reload disturbs more than a swap
  }

  place();
  show();
  setInterval(show, 1000);
  document.addEventListener("visibilitychange", function () { if (!document.hidden) renew(); });
  again();
})();
