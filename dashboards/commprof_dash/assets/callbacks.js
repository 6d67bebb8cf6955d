// Callbacks that run in the browser. The address is the state of a page: its controls are written there, as
// key=value with one pair per value, and the server draws what the address says.
(() => {
  const pair = ([key, value]) => key + "=" + encodeURIComponent(value).replaceAll("%2F", "/");
  const RUN_KEYS = ["from", "to", "record", "ranks"];  // they say nothing about another run

  // The query with `pairs` for the keys `own` of a page. The keys of other pages stay, so that a page that is left is
  // found again as it was.
  const search_with = (own, pairs) => {
    const query = new URLSearchParams(window.location.search);
    const runs = (all) => all.filter(([key]) => key === "run").map(([, value]) => value).join("\n");
    const moved = own.includes("run") && query.has("run") && runs([...query]) !== runs(pairs);
    const kept = [...query].filter(([key]) => !own.includes(key) && !(moved && RUN_KEYS.includes(key)));
    const all = [...pairs, ...kept];
    return all.length ? "?" + all.map(pair).join("&") : "";
  };
  // Links of the navigation keep the run, the step and the filters of the address.
  const keep_links = () => {
    for (const link of document.querySelectorAll("#navigation a")) {
      const path = new URL(link.href).pathname;
      window.dash_clientside.set_props({type: "page-link", path}, {href: path + window.location.search});
    }
  };
  const replace_search = (search) => {
    if (search !== window.location.search) {
      window.history.replaceState(window.history.state, "", window.location.pathname + search);
      keep_links();
    }
  };

  window.commprof = {search_with, replace_search};

  const same_search = (one, other) => {
    const sorted = (search) => [...new URLSearchParams(search)].map(pair).sort().join("&");
    return sorted(one) === sorted(other);
  };

  // A chart as a file: with the title and the legend of its card, on the background of the card.
  const download_images = async (button) => {
    const card = button.closest(".card"), form = button.dataset.image;
    const plots = [...card.querySelectorAll(".js-plotly-plot")];
    for (const [number, plot] of plots.entries()) {
      const heading = (plot.closest(".grid-cell") || card).querySelector("h2, h3");
      const many = plot.data.filter((trace) => trace.type !== "heatmap" && trace.name).length > 1;
      const margin = plot.layout.margin || {}, room = {t: (margin.t ?? 8) + 34, b: (margin.b ?? 8) + (many ? 40 : 0)};
      const width = plot.clientWidth, height = plot.clientHeight + 34 + (many ? 40 : 0);
      const layout = {...plot.layout, width, height, margin: {...margin, ...room}, showlegend: many,
        legend: {orientation: "h", yref: "container", y: 0, yanchor: "bottom"},
        title: {text: heading ? heading.textContent : "", x: 0.01, y: 1 - 8 / height, yanchor: "top", font: {size: 15}},
        paper_bgcolor: getComputedStyle(card).backgroundColor};
      const url = await window.Plotly.toImage({data: plot.data, layout}, {format: form, width, height, scale: form === "png" ? 2 : 1});
      const link = document.createElement("a");
      link.href = url;
      link.download = "commprof-" + button.dataset.name + (plots.length > 1 ? "-" + (number + 1) : "") + "." + form;
      link.click();
    }
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-image]");
    if (button) {
      download_images(button);
    }
  });

window.dash_clientside = Object.assign({}, window.dash_clientside, {
  address: {
    write(values, ids, [drawn]) {
      const no_update = window.dash_clientside.no_update;
      const same = (a, b) => JSON.stringify(a ?? null) === JSON.stringify(b ?? null);
      // Controls that were just drawn have changed nothing, whether the address named their values or not.
      if (!drawn || ids.every(({key}, i) => same(values[i], drawn.held[key]))) {
        return no_update;
      }
      const pairs = ids.flatMap(({key}, i) => {
        const value = values[i] ?? "";
        const items = Array.isArray(value) ? (value.length ? value : [""]) : [value];
        return items.map((item) => [key, item]);
      });
      const search = search_with(ids.map(({key}) => key), pairs);
      if (search !== window.location.search) {
        window.history.pushState({}, "", window.location.pathname + search);
        window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
      }
      return no_update;
    },
  },
  compare: {
    // A click on a heading sorts by its column, a second one the other way around; the order stands in the address.
    sort(_clicks) {
      const pressed = window.dash_clientside.callback_context.triggered.find((one) => one.value);
      if (pressed) {
        const {column} = JSON.parse(pressed.prop_id.slice(0, pressed.prop_id.lastIndexOf(".")));
        const other = new URLSearchParams(window.location.search).get("sort") === column ? "-" + column : column;
        const rest = window.location.search.slice(1).split("&").filter((pair) => pair && !pair.startsWith("sort="));
        window.history.pushState({}, "", window.location.pathname + "?" + [...rest, "sort=" + other].join("&"));
        window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
      }
    },
  },
  runs: {
    // The ticked runs stand in the address, so that it can be shared; a ticked sweep stands for its runs.
    tick(selected) {
      const ticked = [...new Set((Array.isArray(selected) ? selected : []).flatMap(({name, members}) => members || [name]))];
      if (window.location.pathname === "/") {
        replace_search(search_with(["tick"], ticked.map((name) => ["tick", name])));
      }
      return ["/compare" + (ticked.length ? "?" + ticked.map((name) => pair(["run", name])).join("&") : ""),
        ticked.length ? ticked.length + " ticked" : "none ticked: compares the newest runs"];
    },
    ready(grid) {
      window.dash_ag_grid.getApiAsync(grid).then(window.commprof.runs_ready);
      return window.dash_clientside.no_update;
    },
    search(text, grid) {
      window.dash_ag_grid.getApi(grid)?.setGridOption("quickFilterText", text || "");
      replace_search(search_with(["find"], text ? [["find", text]] : []));
      return window.dash_clientside.no_update;
    },
  },
  records: {
    // Filters, order and columns of the grid stand in the address; the grid itself asks the server for rows.
    write(state, run) {
      if (!state || !run || window.location.pathname !== "/records") {
        return window.dash_clientside.no_update;
      }
      const pairs = [["run", run], ...state.pairs];
      const search = search_with(["run", "filter", "sort", "column"], pairs);
      const now = window.location.search;
      if (same_search(search, now)) {
        return window.dash_clientside.no_update;
      }
      if (!state.drawn) {
        replace_search(search);
      } else if (new URLSearchParams(now).get("run") === run && window.commprof_drawn_again !== now) {
        // The page was drawn again, for another scheme say, from an address that is older than the one that is shown.
        window.commprof_drawn_again = now;
        window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
      }
      return window.dash_clientside.no_update;
    },
  },
  timeline: {
    // The view (from, to in ns since the run began; ranks; record) is in a store; the server draws it, the address holds it.
    move(relayout, click, _clicks, ranks, record, view) {
      const {no_update, callback_context, set_props} = window.dash_clientside;
      // One call may tell of several inputs: a button that is pressed while a new graph tells its size counts.
      const triggered = callback_context.triggered;
      const by = (name) => triggered.find((one) => one.prop_id.includes(name));
      if (!view || !triggered.length) {
        return no_update;
      }
      const next = (changes) => ({...view, ...changes, drawn: false});
      const window_of = (first, last) => {
        const middle = (first + last) / 2, most = view.length * 1.1;
        const half = Math.min(Math.max(last - first, 20), most) / 2;
        const from = Math.round(middle - half), to = Math.round(middle + half);
        return next({from, to, first: from, last: to});
      };
      const span = view.last - view.first;
      const pressed = triggered.find((one) => one.prop_id.includes("timeline-button") && one.value);
      if (pressed) {
        const what = JSON.parse(pressed.prop_id.slice(0, pressed.prop_id.lastIndexOf("."))).what;
        const moved = {in: [span / 4, -span / 4], out: [-span / 2, span / 2], left: [-0.4 * span, -0.4 * span],
          right: [0.4 * span, 0.4 * span]}[what];
        return moved ? window_of(view.first + moved[0], view.last + moved[1])
          : next({from: null, to: null, first: 0, last: view.length});
      }
      if (by("clickData")) {
        const point = click && click.points && click.points[0];
        if (!point) {
          return no_update;
        }
        if (point.customdata) {
          const chosen = point.customdata[0].join(".");
          set_props("timeline-record", {value: chosen});
          return next({record: chosen});
        }
        return window_of(point.x - span / 16, point.x + span / 16);
      }
      if (by("timeline-ranks") && (ranks || "") !== (view.ranks || "")) {
        return next({ranks: ranks || ""});
      }
      if (by("timeline-record") && (record || "") !== (view.record || "")) {
        return next({record: record || null});
      }
      if (by("relayoutData")) {
        // A graph that was just drawn tells its size only; while it is dragged or the wheel turns it tells each frame.
        const first = (relayout || {})["xaxis.range[0]"], last = (relayout || {})["xaxis.range[1]"];
        if (typeof first === "number" && typeof last === "number" && last > first) {
          clearTimeout(window.commprof_zoom);
          window.commprof_zoom = setTimeout(() => set_props("timeline-view", {data: window_of(first, last)}), 150);
        }
      }
      return no_update;  // buttons that were just drawn, too
    },
    write(view, run) {
      const {no_update, set_props} = window.dash_clientside;
      if (!view || !run || window.location.pathname !== "/timeline") {
        return no_update;
      }
      const keys = ["from", "to", "ranks", "record"];
      const query = new URLSearchParams(window.location.search);
      if (view.drawn) {
        // The page was drawn again, for another scheme say, from an address that is older than the one that is shown.
        const shown = Object.fromEntries(keys.map((key) => [key, query.get(key)]));
        if (keys.some((key) => String(shown[key] ?? "") !== String(view[key] ?? "")) && query.get("run") === run) {
          const number = (text) => text === null || text === "" ? null : Number(text);
          const from = number(shown.from), to = number(shown.to);
          set_props("timeline-view", {data: {...view, from, to, ranks: shown.ranks ?? "", record: shown.record,
            first: from ?? 0, last: to ?? view.length, drawn: false}});
        }
        return no_update;
      }
      const pairs = [["run", run], ...keys.map((key) => [key, view[key]])].filter(([, value]) => (value ?? "") !== "");
      replace_search(search_with(["run", ...keys], pairs));
      return no_update;
    },
    wait(done) {
      if (done) {
        window.location.reload();
      }
      return window.dash_clientside.no_update;
    },
  },
  scheme: {
    // Mantine keeps the scheme that is drawn, toggled or the system's, in an attribute of the root element.
    watch() {
      const root = document.documentElement;
      const scheme = () => root.getAttribute("data-mantine-color-scheme") === "dark" ? "dark" : "light";
      const tell = () => {
        root.setAttribute("data-ag-theme-mode", scheme());
        window.dash_clientside.set_props("scheme", {data: scheme()});
      };
      new MutationObserver(tell).observe(root, {attributes: true, attributeFilter: ["data-mantine-color-scheme"]});
      root.setAttribute("data-ag-theme-mode", scheme());
      return scheme();
    },
  },
  shell: {
    // The ticks that ask for the page again. A tick during a drawing would discard what is being drawn.
    follow(ticks) {
      return document.querySelector('#page [data-dash-is-loading="true"]') ? window.dash_clientside.no_update
        : {ticks, search: window.location.search};
    },
    // A page was drawn: the title names it and its run, the address names the run, the links keep both.
    arrive([drawn]) {
      if (drawn && drawn.page === window.location.pathname) {
        document.title = drawn.title;
        if (drawn.run && !new URLSearchParams(window.location.search).has("run")) {
          replace_search(search_with(["run"], [["run", drawn.run]]));
        }
        keep_links();
      }
      return window.dash_clientside.no_update;
    },
    toggle_menu(opened, _pathname, navbar) {
      const by_button = window.dash_clientside.callback_context.triggered.some((t) => t.prop_id.endsWith(".opened"));
      if (!by_button && opened) {
        window.dash_clientside.set_props("menu-button", {opened: false});
      }
      return {...navbar, collapsed: {mobile: !(by_button && opened)}};
    },
  },
});
})();
