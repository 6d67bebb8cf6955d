// Callbacks that run in the browser. The address is the state of a page: its controls are written there, as
// key=value with one pair per value, and the server draws what the address says.
(() => {
  const pair = ([key, value]) => key + "=" + encodeURIComponent(value).replaceAll("%2F", "/");
  const RUN_KEYS = ["from", "to", "record", "ranks"];  // they say nothing about another run,
  const STEP_KEYS = ["from", "to", "record"];  // nor these about another step

  // The query with `pairs` for the keys `own` of a page. The keys of other pages stay, so that a page that is left is
  // found again as it was.
  const search_with = (own, pairs) => {
    const query = new URLSearchParams(window.location.search);
    const values = (all, wanted) => all.filter(([key]) => key === wanted).map(([, value]) => value).join("\n");
    const moved = (key) => own.includes(key) && query.has(key) && values([...query], key) !== values(pairs, key);
    const dropped = moved("run") ? RUN_KEYS : moved("step") ? STEP_KEYS : [];
    const kept = [...query].filter(([key]) => !own.includes(key) && !dropped.includes(key));
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

  // The browser compiles the code of the charts while the server draws the page. Dash would load it when the first chart is
  // there; it waits for a promise in the place of Plotly.
  const load_plotly = () => {
    if (!window.Plotly && window._dashPlotlyJSURL) {
      const script = document.createElement("script");
      script.src = window._dashPlotlyJSURL;
      window.Plotly = new Promise((resolve, reject) => {
        script.onload = () => resolve(window.Plotly);
        script.onerror = () => {
          window.Plotly = undefined;  // Dash tries again with the next chart
          reject(new Error("the code of the charts could not be loaded from " + script.src));
        };
      });
      document.body.append(script);
    }
  };

  window.commprof = {search_with, replace_search};

  const TIMELINE_KEYS = ["from", "to", "ranks", "record", "step", "rows", "by"];
  // The view of the timeline with the window from first to last, neither shorter than 20 ns nor much longer than the run.
  // A step that is out of the window is not the step of the page any more.
  const window_in = (view, first, last) => {
    const middle = (first + last) / 2, half = Math.min(Math.max(last - first, 20), view.length * 1.1) / 2;
    const from = Math.round(middle - half), to = Math.round(middle + half);
    const has_step = view.step_first !== null && from < view.step_last && to > view.step_first;
    return {...view, from, to, first: from, last: to, step: has_step ? view.step : null, drawn: false};
  };
  let timeline_view = null;
  const show_window = (view) => {
    timeline_view = view;
    const frame = document.getElementById("timeline-window");
    if (frame) {
      const share = (time) => 100 * Math.min(Math.max(time / view.length, 0), 1);
      frame.style.left = share(view.first) + "%";
      frame.style.width = share(view.last) - share(view.first) + "%";
    }
  };
  // W and S zoom, A and D move, as in Perfetto. The graph moves at once and tells; then the server draws the window.
  const MOVES = {w: [0.2, -0.2], s: [-0.333, 0.333], a: [-0.25, -0.25], d: [0.25, 0.25]};
  document.addEventListener("keydown", (event) => {
    const move = MOVES[event.key.toLowerCase()];
    const plot = document.querySelector("#card-timeline .js-plotly-plot");
    const is_typing = event.target.closest("input, textarea, select, [contenteditable=true]");
    if (move && plot && plot._fullLayout && !(is_typing && is_typing.type !== "radio")
        && !event.ctrlKey && !event.metaKey && !event.altKey) {
      const [first, last] = plot._fullLayout.xaxis.range, span = last - first;
      window.Plotly.relayout(plot, {"xaxis.range": [first + move[0] * span, last + move[1] * span]});
    }
  });
  // Dragging over the minimap chooses a window; a click moves the window there.
  let drag = null;
  const time_at = (map, event) => {
    const box = map.getBoundingClientRect();
    return Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1) * timeline_view.length;
  };
  document.addEventListener("pointerdown", (event) => {
    const map = event.target.closest("#timeline-minimap");
    if (map && timeline_view) {
      drag = {map, from: time_at(map, event), x: event.clientX};
      event.preventDefault();
    }
  });
  document.addEventListener("pointermove", (event) => {
    if (drag && Math.abs(event.clientX - drag.x) > 4) {
      const to = time_at(drag.map, event);
      show_window({...timeline_view, first: Math.min(drag.from, to), last: Math.max(drag.from, to)});
    }
  });
  document.addEventListener("pointerup", (event) => {
    if (drag) {
      const to = time_at(drag.map, event), half = (timeline_view.last - timeline_view.first) / 2;
      const [first, last] = Math.abs(event.clientX - drag.x) > 4 ? [Math.min(drag.from, to), Math.max(drag.from, to)]
        : [to - half, to + half];
      drag = null;
      window.dash_clientside.set_props("timeline-view", {data: window_in(timeline_view, first, last)});
    }
  });

  const same_search = (one, other) => {
    const sorted = (search) => [...new URLSearchParams(search)].map(pair).sort().join("&");
    return sorted(one) === sorted(other);
  };

  const element = (type, props) => ({namespace: "dash_html_components", type, props});

  // Says what is being read, and for how many seconds, until the page is drawn: at once on another page, after 0.3 s where
  // the page stays as it is until then.
  const READING_MS = 300;
  let reading = null;
  const stop_reading = () => {
    clearInterval(reading);
    clearTimeout(reading);
    reading = null;
    delete document.getElementById("page")?.dataset.reading;
    window.dash_clientside.set_props("progress", {children: []});
  };
  const start_reading = (text, at_once) => {
    stop_reading();
    const begin = performance.now();
    const tell = () => {
      const seconds = Math.round((performance.now() - begin) / 1000);
      const clock = element("Span", {children: seconds ? " " + seconds + " s" : "", "aria-hidden": "true"});
      window.dash_clientside.set_props("progress", {children: [element("Span", {children: text}), clock]});
    };
    const start = () => {
      document.getElementById("page").dataset.reading = at_once ? "another" : "this";
      tell();
      reading = setInterval(tell, 1000);
    };
    at_once ? start() : reading = setTimeout(start, READING_MS);
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
  // What is behind a line is drawn when the line is opened first, by a click or by this program.
  document.addEventListener("toggle", ({target}) => {
    if (target.open && target.dataset.fold) {
      window.dash_clientside.set_props({type: "fold", number: Number(target.dataset.fold)}, {opened: true});
    }
  }, true);
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
      // Another run fills the form of Plan anew.
      const has_moved = ids.some(({key}, i) => key === "run" && !same(values[i], drawn.held.run));
      const is_form = window.location.pathname === "/plan";
      const written = is_form && has_moved ? pairs.filter(([key]) => key === "run") : pairs;
      const search = search_with(ids.map(({key}) => key), written);
      if (search !== window.location.search) {
        window.history.pushState({}, "", window.location.pathname + search);
        window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
      }
      return no_update;
    },
  },
  buckets: {
    choose(click) {
      const point = click && click.points && click.points[0];
      if (point) {
        window.dash_clientside.set_props({type: "control", key: "bucket"}, {value: String(point.x)});
      }
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
        ticked.length ? ticked.length + " ticked" : "none ticked: compares the newest sweep or program"];
    },
    ready(grid) {
      window.dash_ag_grid.getApiAsync(grid).then(window.commprof.runs_ready);
      return window.dash_clientside.no_update;
    },
    // Another choice of columns is drawn by the server, from the address.
    columns(_clicks) {
      const all = new URLSearchParams(window.location.search).get("columns") === "all";
      const search = search_with(["columns"], all ? [] : [["columns", "all"]]);
      window.history.pushState({}, "", window.location.pathname + search);
      window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
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
      const has_state = ["filter", "sort", "column"].some((key) => new URLSearchParams(now).has(key));
      if (!state.drawn || !has_state) {
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
      const window_of = (first, last) => window_in(view, first, last);
      const span = view.last - view.first;
      const pressed = triggered.find((one) => one.prop_id.includes("timeline-button") && one.value);
      if (pressed) {
        const what = JSON.parse(pressed.prop_id.slice(0, pressed.prop_id.lastIndexOf("."))).what;
        const moved = {in: [span / 4, -span / 4], out: [-span / 2, span / 2], left: [-0.4 * span, -0.4 * span],
          right: [0.4 * span, 0.4 * span]}[what];
        return moved ? window_of(view.first + moved[0], view.last + moved[1])
          : window_of(0, view.length);
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
        const plot = document.querySelector("#card-timeline .js-plotly-plot");
        const unfolds = ((plot.data[point.curveNumber] || {}).meta || {}).unfolds;
        if (unfolds) {
          const chosen = unfolds[Math.round(point.y)];
          set_props("timeline-ranks", {value: chosen});
          if (document.getElementById("timeline-rows")) {
            set_props("timeline-rows", {value: "ranks"});
          }
          return next({ranks: chosen, rows: "ranks"});
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
        const {"xaxis.range": both = []} = relayout || {};
        const first = (relayout || {})["xaxis.range[0]"] ?? both[0], last = (relayout || {})["xaxis.range[1]"] ?? both[1];
        if (typeof first === "number" && typeof last === "number" && last > first) {
          clearTimeout(window.commprof_zoom);
          window.commprof_zoom = setTimeout(() => set_props("timeline-view", {data: window_of(first, last)}), 150);
        }
      }
      return no_update;  // buttons that were just drawn, too
    },
    arrange(value, view) {
      const pressed = window.dash_clientside.callback_context.triggered[0];
      const key = pressed && pressed.prop_id.includes("rows") ? "rows" : "by";
      return view && value && value !== view[key] ? {...view, [key]: value, drawn: false} : window.dash_clientside.no_update;
    },
    hover(told) {
      const point = told && told.points && told.points[0];
      const text = point && (point.customdata ? point.customdata[1] : point.text);
      if (!text) {
        return window.dash_clientside.no_update;
      }
      const lines = document.createElement("textarea");  // decodes entities and runs nothing
      lines.innerHTML = text.replaceAll("<br>", " \u00b7 ").replace(/<\/?b>/g, "");
      return lines.value;
    },
    write(view, run) {
      const {no_update, set_props} = window.dash_clientside;
      if (!view || !run || window.location.pathname !== "/timeline") {
        return no_update;
      }
      show_window(view);
      const keys = TIMELINE_KEYS;
      const query = new URLSearchParams(window.location.search);
      if (view.drawn && keys.slice(0, 2).some((key) => query.has(key))) {
        // The page was drawn again, for another scheme say, from an address that is older than the one that is shown.
        const shown = Object.fromEntries(keys.map((key) => [key, query.get(key)]));
        if (keys.some((key) => String(shown[key] ?? "") !== String(view[key] ?? "")) && query.get("run") === run) {
          const number = (text) => text === null || text === "" ? null : Number(text);
          const from = number(shown.from), to = number(shown.to);
          set_props("timeline-view", {data: {...view, ...shown, from, to, ranks: shown.ranks ?? "", step: number(shown.step),
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
    // Mantine keeps the scheme that is drawn, toggled or the system's, in an attribute of the root element. A wide window is
    // reported with it: its charts have room for long labels.
    watch() {
      const root = document.documentElement, width = window.matchMedia("(min-width: 1200px)");
      const scheme = () => root.getAttribute("data-mantine-color-scheme") === "dark" ? "dark" : "light";
      const told = () => scheme() + (width.matches ? " wide" : "");
      const tell = () => {
        root.setAttribute("data-ag-theme-mode", scheme());
        window.dash_clientside.set_props("scheme", {data: told()});
      };
      width.addEventListener("change", tell);
      new MutationObserver(tell).observe(root, {attributes: true, attributeFilter: ["data-mantine-color-scheme"]});
      root.setAttribute("data-ag-theme-mode", scheme());
      return told();
    },
  },
  shell: {
    // The ticks that ask for the page again. A tick during a drawing would discard what is being drawn.
    follow(ticks) {
      return document.querySelector('#page [data-dash-is-loading="true"]') ? window.dash_clientside.no_update
        : {ticks, search: window.location.search};
    },
    // Another page: its heading, and what is being read for it, until the server has drawn it. The same page stays, paler.
    depart(pathname, search, pages, [drawn]) {
      const path = pathname || window.location.pathname, query = new URLSearchParams(search || "");
      const named = query.getAll(query.has("run") ? "run" : "tick").filter(Boolean);
      const runs = path === "/" ? [] : path === "/compare" ? named : named.slice(0, 1);
      const [title, question, has_charts] = pages["/" + path.replace(/^\/+|\/+$/g, "")] || ["No such page", "", false];
      const is_other = !drawn || drawn.page !== path;
      if (is_other) {
        const heading = [element("H1", {children: title}), element("P", {children: question, className: "question"})];
        const {set_props} = window.dash_clientside;
        for (const link of document.querySelectorAll("#navigation a")) {
          const of = new URL(link.href).pathname, active = of === path;
          if (active !== link.hasAttribute("data-active")) {
            set_props({type: "page-link", path: of}, {active});
          }
        }
        set_props("heading", {children: heading});
        if (drawn) {
          set_props("controls", {children: []});
          set_props("body", {children: []});
        }
      }
      if (has_charts) {
        load_plotly();
      }
      const subject = runs.length > 1 ? runs.length + " runs" : runs[0];
      start_reading(subject ? "Reading " + subject + " ..." : "Preparing " + title + " ...", is_other);
    },
    // A page was drawn: the title names it and its run, the address names the run, the links keep both.
    arrive([drawn]) {
      if (drawn && drawn.page === window.location.pathname) {
        stop_reading();
        document.title = drawn.title;
        const [key, value] = drawn.kept || [];
        if (key === "run" && !new URLSearchParams(window.location.search).has("run")) {
          replace_search(search_with(["run"], [["run", value]]));
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
