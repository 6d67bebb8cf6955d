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
  runs: {
    // The ticked runs stand in the address, so that it can be shared; the page need not be drawn again for that.
    tick(ticked) {
      const pairs = (key) => ticked.map((name) => key + "=" + encodeURIComponent(name).replaceAll("%2F", "/")).join("&");
      window.history.replaceState(window.history.state, "", window.location.pathname + (ticked.length ? "?" + pairs("tick") : ""));
      return ["/compare" + (ticked.length ? "?" + pairs("run") : ""),
        ticked.length ? ticked.length + " ticked" : "none ticked: compares the newest runs"];
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
