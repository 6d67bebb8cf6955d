// The page of a run that is being recorded is drawn again every few seconds, each time with new elements. Folds that were
// opened or closed by hand, the focus, and the place in the table of records stay as they were.
(() => {
  const folds = new Map();  // whether a fold is open, by its card and its words without numbers, which grow
  let focus = null;
  let place = {of: null, top: 0};

  const in_body = (node) => node instanceof Element && node.closest("#body") !== null;
  const fold_of = (details) => (details.closest("[id^=card-]")?.id ?? "") + " "
    + (details.querySelector("summary")?.textContent ?? "").replace(/[\d.,]+/g, "#");
  const page_now = () => window.location.pathname + " " + new URLSearchParams(window.location.search).get("run");

  document.addEventListener("click", (event) => {
    const summary = event.target instanceof Element ? event.target.closest("summary") : null;
    if (summary && in_body(summary)) {
      folds.set(fold_of(summary.parentElement), !summary.parentElement.open);  // which the click changes next
    }
  }, true);
  document.addEventListener("focusin", ({target}) => {
    focus = !in_body(target) ? null
      : target.localName === "summary" ? {fold: fold_of(target.parentElement)} : target.id ? {id: target.id} : null;
  });
  document.addEventListener("scroll", ({target}) => {
    if (target instanceof Element && target.matches("#records-grid .ag-body-viewport") && !target.dataset.restoring) {
      place = {of: page_now(), top: target.scrollTop};
    }
  }, true);

  const scroll_back = (viewport) => {
    const {of, top} = place, until = performance.now() + 5000;
    if (!top || of !== page_now()) {
      return;
    }
    viewport.dataset.restoring = "true";
    const timer = setInterval(() => {  // until the server has said how many rows there are
      const is_high = viewport.scrollHeight - viewport.clientHeight >= top;
      if (is_high || !viewport.isConnected || performance.now() > until) {
        clearInterval(timer);
        viewport.scrollTop = is_high ? top : viewport.scrollTop;
        setTimeout(() => delete viewport.dataset.restoring, 100);
      }
    }, 50);
  };
  const among = (nodes, selector) => nodes.flatMap((node) => [...(node.matches(selector) ? [node] : []),
    ...node.querySelectorAll(selector)]);

  new MutationObserver((changes) => {
    const added = changes.flatMap(({addedNodes}) => [...addedNodes]).filter((node) => node instanceof HTMLElement && in_body(node));
    if (!added.length) {
      return;
    }
    for (const details of among(added, "details")) {
      const is_open = folds.get(fold_of(details));
      if (is_open !== undefined && is_open !== details.open) {
        details.open = is_open;
      }
    }
    among(added, ".ag-body-viewport").filter((viewport) => viewport.closest("#records-grid")).forEach(scroll_back);
    if (focus && (document.activeElement === document.body || document.activeElement === null)) {
      const again = focus.id ? document.getElementById(focus.id)
        : [...document.querySelectorAll("#body details")].find((one) => fold_of(one) === focus.fold)?.querySelector("summary");
      if (again && in_body(again)) {
        again.focus({preventScroll: true});
      }
    }
  }).observe(document.documentElement, {childList: true, subtree: true});
})();
