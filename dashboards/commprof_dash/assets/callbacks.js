// Callbacks that run in the browser. The address is the state of a page: its controls are written there, as
// key=value with one pair per value, and the server draws what the address says.
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
        return items.map((item) => key + "=" + encodeURIComponent(item).replaceAll("%2F", "/"));
      });
      const search = "?" + pairs.join("&");
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
    // The ticked runs stand in the address, so that it can be shared; the page need not be drawn again for that.
    tick(ticked) {
      const pairs = (key) => ticked.map((name) => key + "=" + encodeURIComponent(name).replaceAll("%2F", "/")).join("&");
      window.history.replaceState(window.history.state, "", window.location.pathname + (ticked.length ? "?" + pairs("tick") : ""));
      return ["/compare" + (ticked.length ? "?" + pairs("run") : ""),
        ticked.length ? ticked.length + " ticked" : "none ticked: compares the newest runs"];
    },
  },
  records: {
    // Filters, order and columns of the grid stand in the address; the grid itself asks the server for rows.
    write(state, run) {
      if (!state || !run || window.location.pathname !== "/records") {
        return window.dash_clientside.no_update;
      }
      const pairs = [["run", run], ...state.pairs];
      const search = "?" + pairs.map(([key, value]) => key + "=" + encodeURIComponent(value).replaceAll("%2F", "/")).join("&");
      const now = window.location.search;
      if (search === now) {
        return window.dash_clientside.no_update;
      }
      if (!state.drawn) {
        window.history.replaceState(window.history.state, "", window.location.pathname + search);
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
      const search = "?" + pairs.map(([key, value]) => key + "=" + encodeURIComponent(value).replaceAll("%2F", "/")).join("&");
      if (search !== window.location.search) {
        window.history.replaceState(window.history.state, "", window.location.pathname + search);
      }
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
    toggle_menu(opened, _pathname, navbar) {
      const by_button = window.dash_clientside.callback_context.triggered.some((t) => t.prop_id.endsWith(".opened"));
      if (!by_button && opened) {
        window.dash_clientside.set_props("menu-button", {opened: false});
      }
      return {...navbar, collapsed: {mobile: !(by_button && opened)}};
    },
  },
});
