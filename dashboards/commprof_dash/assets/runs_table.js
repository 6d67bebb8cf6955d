// The table of runs: sweeps that open, rows below their sweep, and its state in the address. Keys of the table of records.
(() => {
  const components = window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {};
  const functions = window.dashAgGridFunctions = window.dashAgGridFunctions || {};
  const ALL_COLUMNS_PIXELS = 1620;  // a grid that is wider has room for every column
  let open = new Set();

  const is_filtered = (api) => api.isQuickFilterPresent() || Object.keys(api.getFilterModel() || {}).length > 0;
  const go = (event, href) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey && event.button === 0) {
      event.preventDefault();
      window.history.pushState({}, "", href);
      window.dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
      window.scrollTo(0, 0);
    }
  };

  components.RunName = ({data, api, node}) => {
    const element = window.React.createElement;
    if (!data.members) {
      const inner = data.href ? element("a", {href: data.href, onClick: (event) => go(event, data.href)}, data.name) : data.name;
      return element("span", {className: data.sweep ? "run-of-sweep" : ""}, inner);
    }
    const toggle = () => {
      open.has(data.name) ? open.delete(data.name) : open.add(data.name);
      api.onFilterChanged();
      api.refreshCells({rowNodes: [node], force: true});
      functions.runsWrite({api});
    };
    return element("button", {type: "button", className: "sweep-toggle", "aria-expanded": open.has(data.name), onClick: toggle},
      (open.has(data.name) ? "\u25be " : "\u25b8 ") + data.name + " (" + data.members.length + " runs)");
  };

  // Keys of a config are long words: they break after an underscore or an equals sign, never within a part.
  components.RunSetting = ({value}) => {
    const parts = String(value ?? "").split(/(?<=[_=])/);
    const pieces = parts.flatMap((part, place) => place ? [window.React.createElement("wbr", {key: place}), part] : [part]);
    return window.React.createElement("span", {className: "run-setting"}, ...pieces);
  };

  functions.runsCheckbox = (params) => Boolean(params.data && (params.data.members || params.data.href));
  functions.runsSelectable = functions.runsCheckbox;
  // Filters and the search look at runs; without them a sweep is one row, with its runs below it when it is open.
  functions.runsShown = ({data}) => {
    const grid = window.dash_ag_grid.getApi("runs-grid");
    return grid && is_filtered(grid) ? !data.members : !data.sweep || open.has(data.sweep);
  };
  functions.runsSorted = ({nodes}) => {
    const below = new Map();
    const heads = new Set(nodes.filter(({data}) => data.members).map(({data}) => data.name));
    for (const node of nodes) {
      const {sweep} = node.data;
      if (sweep && heads.has(sweep)) {
        below.set(sweep, [...(below.get(sweep) || []), node]);
      }
    }
    const sorted = nodes.filter(({data}) => !(data.sweep && heads.has(data.sweep)))
      .flatMap((node) => [node, ...(node.data.members ? below.get(node.data.name) || [] : [])]);
    nodes.splice(0, nodes.length, ...sorted);
  };
  window.commprof.runs_ready = (api) => {
    const query = new URLSearchParams(window.location.search), before = [...open].join("\n");
    open = new Set(query.getAll("open"));
    // Each of these draws the table again: of an address that asks for nothing it is there as it should be.
    if (query.get("where")) {
      try {
        api.setFilterModel(JSON.parse(query.get("where")));
      } catch {
        // An address may hold anything; what is no filter filters nothing.
      }
    }
    if (query.get("find")) {
      api.setGridOption("quickFilterText", query.get("find"));
    }
    const hidden = api.getColumns().filter((column) => !column.isVisible());
    const room = document.getElementById("runs-grid").clientWidth - ALL_COLUMNS_PIXELS;
    if (hidden.length && room >= 0) {
      api.setColumnsVisible(hidden, true);
    }
    if ([...open].join("\n") !== before) {
      api.onFilterChanged();
      api.refreshCells({columns: ["name"], force: true});
    }
  };
  functions.runsKey = ({event}) => {
    if (event.key === "Enter") {
      event.target.querySelector("a, button")?.click();
    }
  };
  // Enter on a row of Records shows all about it, as a click does; on the link of the first column it follows that.
  functions.recordsKey = ({event, column, node}) => {
    if (event.key === "Enter" && node?.id) {
      const link = event.target.querySelector("a"), cell = {rowId: node.id, colId: column.getColId(), timestamp: Date.now()};
      link ? link.click() : window.dash_clientside.set_props("records-grid", {cellClicked: cell});
    }
  };
  functions.runsWrite = ({api}) => {
    const sorted = api.getColumnState().find((column) => column.sort);
    const filters = api.getFilterModel() || {};
    window.commprof.replace_search(window.commprof.search_with(["order", "where", "open"], [
      ...(sorted ? [["order", (sorted.sort === "desc" ? "-" : "") + sorted.colId]] : []),
      ...(Object.keys(filters).length ? [["where", JSON.stringify(filters)]] : []),
      ...[...open].map((name) => ["open", name])]));
  };
})();
