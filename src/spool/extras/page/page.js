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

  function box() { return document.getElementById("filter"); }

  function all(what) { return Array.from(document.querySelectorAll(what)); }

  // What the reader has made of the page: the filter, what is unfolded, the place.
  function kept() {
    return {
      words: box().value,
      types: document.activeElement === box(),
      open: all("details[open]").map(function (each) { return each.id; }),
      y: scrollY
    };
  }

  function restore(before) {
    box().hidden = false;
    box().value = before.words;
    before.open.forEach(function (id) {
      var each = document.getElementById(id);
      if (each) each.open = true;
    });
    filter();
    if (before.types) box().focus({ preventScroll: true });
    scrollTo(0, before.y);
  }

  function keep() {
    try { sessionStorage.setItem(key, JSON.stringify(kept())); } catch (error) { /* without, it begins anew */ }
  }

  function place() {
    var before = { words: "", open: [], y: scrollY };
    try {
      before = JSON.parse(sessionStorage.getItem(key)) || before;
      sessionStorage.removeItem(key);
    } catch (error) { /* likewise */ }
    restore(before);
  }

  function filter() {
    var words = box().value.toLowerCase().split(/\s+/);
    all("tbody tr").forEach(function (row) {
      var text = row.textContent.toLowerCase();
      row.hidden = !words.every(function (word) { return text.includes(word); });
    });
  }

  function swap(text) {
    var other = new DOMParser().parseFromString(text, "text/html");
    var next = other.documentElement;
    if (!next.dataset.written || next.dataset.written === html.dataset.written) return;
    if (next.dataset.look !== html.dataset.look) { keep(); location.reload(); return; }
    ["written", "fresh", "every"].forEach(function (name) { html.dataset[name] = next.dataset[name]; });
    document.title = other.title;
    var before = kept();
    document.body.replaceWith(document.adoptNode(other.body));
    restore(before);
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
  document.addEventListener("input", filter);
  document.addEventListener("visibilitychange", function () { if (!document.hidden) renew(); });
  again();
})();
