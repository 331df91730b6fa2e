"use strict";
(function () {
  const runs = JSON.parse(document.getElementById("hdi-data").textContent);
  const LIMITS = { pair: 0.8, mean: 0.5 };
  const NOTHING = 255;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const CONFIG = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: false };
  const number = (value, digits) => (value === null || value === undefined ? "not measured" : value.toFixed(digits === undefined ? 2 : digits));
  const named = (heads) => (heads && heads.length === 2 ? "heads " + heads[0] + " and " + heads[1] : "no pair");
  const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  let isPrinting = false;

  // Which of n ticks are labelled: those in `first` before all others, and none nearer to another than `apart` cells.
  function ticks(n, first, apart) {
    const chosen = [];
    const add = (place) => { if (chosen.every((other) => Math.abs(other - place) >= apart)) chosen.push(place); };
    first.forEach(add);
    const stride = Math.max(1, Math.ceil(apart));
    for (let place = 0; place < n; place += stride) add(place);
    return chosen.sort((a, b) => a - b);
  }

  function base(extra) {
    return Object.assign({
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: css("--grey"), dragmode: false, showlegend: false,
      font: { family: "system-ui, Roboto, DejaVu Sans, sans-serif", size: 12, color: css("--ink") },
      hoverlabel: { align: "left", font: { size: 13 } },
    }, extra);
  }

  function unpack(text, heads) {
    const bytes = atob(text), grid = [];
    for (let row = 0; row < heads; row++) grid.push(new Array(heads).fill(null));
    let place = 0;
    for (let row = 0; row < heads; row++) for (let column = row + 1; column < heads; column++) {
      const byte = bytes.charCodeAt(place++);
      grid[row][column] = grid[column][row] = byte === NOTHING ? null : byte / 250;
    }
    return grid;
  }

  function draw(run, section) {
    const part = (name) => section.querySelector("." + name);
    const width = (node) => (isPrinting ? 640 : node.clientWidth);
    const layerChoice = part("layer-choice"), quantityChoice = part("quantity-choice"), slider = part("slider");
    const state = { layer: run.start, quantity: Object.keys(run.quantities)[0], column: Math.max(0, run.steps.length - 1) };
    if (!run.layers.length) return null;

    run.layers.forEach((name) => {
      const option = document.createElement("option");
      option.value = name; option.textContent = (run.alerted[name] ? "! " : "") + name;
      layerChoice.appendChild(option);
    });
    layerChoice.value = state.layer;
    Object.entries(run.quantities).forEach(([name, words]) => {
      const option = document.createElement("option");
      option.value = name; option.textContent = words;
      quantityChoice.appendChild(option);
    });
    slider.max = Math.max(0, run.steps.length - 1);
    slider.value = state.column;

    const headWord = () => (run.shared[rowOf(state.layer)] ? "key head, shared by several heads" : "head");
    const rowOf = (name) => run.layers.indexOf(name);
    const valueAt = (quantity, layer, column) => run.maps[quantity].values[rowOf(layer)][column];
    const pairAt = (layer, column) => {
      const pairs = run.maps[Object.keys(run.quantities)[0]].pairs;
      return pairs.length ? pairs[rowOf(layer)][column] : null;
    };

    function layerTicks(node, height) {
      const labels = run.labels.map((label) => label);
      const room = Math.min(150, width(node) * 0.34);
      const shown = Math.max(...labels.map((label) => label.length)) * 7 + 24 > room ? run.layers.map((_, row) => "#" + row) : labels;
      const apart = 14 / (height / run.layers.length);
      const first = [rowOf(state.layer), ...Object.keys(run.alerted).map(rowOf).filter((row) => row >= 0)];
      const places = ticks(run.layers.length, first, apart);
      const text = places.map((row) => {
        const words = escaped(shown[row]);
        return run.alerted[run.layers[row]] ? '<b><span style="color:' + css("--bad") + '">&#9656; ' + words + "</span></b>" : words;
      });
      const longest = Math.max(...places.map((row) => shown[row].length));
      return { tickvals: places, ticktext: text, margin: Math.min(room, longest * 7 + 26), isNumbered: shown !== labels };
    }

    function layersMap() {
      const node = part("layers-map");
      const height = Math.min(620, Math.max(150, run.layers.length * 16));
      const y = layerTicks(node, height);
      const isAudit = run.isAudit;
      const quantities = Object.keys(run.quantities);
      const columns = isAudit ? quantities.length : run.steps.length;
      const z = isAudit
        ? run.layers.map((_, row) => quantities.map((name) => run.maps[name].values[row][0]))
        : run.maps[state.quantity].values;
      const pairs = isAudit ? [] : run.maps[state.quantity].pairs;
      const hover = z.map((row, r) => row.map((value, c) => {
        const pair = isAudit ? (run.maps[quantities[c]].pairs.length ? run.maps[quantities[c]].pairs[r][0] : null) : (pairs.length ? pairs[r][c] : null);
        const where = isAudit ? run.quantities[quantities[c]] : "step " + run.steps[c];
        return escaped(run.layers[r]) + "<br>" + where + ": " + number(value) + (pair ? "<br>" + named(pair) : "");
      }));
      const wide = Math.max(...(isAudit ? [10] : run.steps.map((step) => String(step).length))) * 8 + 16;
      const right = isAudit ? 14 : Math.max(14, wide / 2);  // room for the last label, which stands in the middle of its column
      const space = width(node) - y.margin - right;
      const places = isAudit ? quantities.map((_, c) => c) : ticks(columns, [state.column, 0], Math.max(1, wide / (space / columns)));
      const audited = isAudit && space / columns < 130 ? ["pair", "mean", "pair,<br>energy", "mean,<br>energy"] : ["closest pair", "mean", "closest pair<br>by energy", "mean<br>by energy"];
      const traces = [{
        type: "heatmap", z: z, text: hover, hoverinfo: "text", colorscale: "Cividis", zmin: 0, zmax: 1, showscale: false,
        xgap: columns < 40 ? 1 : 0, ygap: run.layers.length < 60 ? 1 : 0, hoverongaps: false,
      }];
      const marks = isAudit
        ? Object.values(run.alerted).map((alert) => [0, rowOf(alert.layer), alert.what])
        : run.alerts.filter((alert) => !alert.isResolved && alert.level !== "notice")
          .map((alert) => [columnOf(alert.step), rowOf(alert.layer), alert.message]);
      const seen = marks.filter((mark) => mark[1] >= 0);
      traces.push({
        type: "scatter", mode: "markers", x: seen.map((m) => m[0]), y: seen.map((m) => m[1]), text: seen.map((m) => wrapped(escaped(m[2]))),
        hoverinfo: "text", marker: { symbol: "circle", size: 9, color: css("--ring"), line: { color: "#fff", width: 1.5 } },
      });
      const row = rowOf(state.layer);
      const shapes = [{ type: "rect", x0: -0.5, x1: columns - 0.5, y0: row - 0.5, y1: row + 0.5, line: { color: run.alerted[state.layer] ? css("--ring") : "#ffffff", width: 2 } }];
      if (!isAudit && columns > 1) shapes.push({ type: "line", x0: state.column, x1: state.column, y0: -0.5, y1: run.layers.length - 0.5, line: { color: "#ffffff", width: 2, dash: "dot" } });
      Plotly.react(node, traces, base({
        height: height + 62, width: width(node), margin: { l: y.margin, r: right, t: 6, b: 56 }, shapes: shapes,
        xaxis: { tickvals: places, ticktext: places.map((c) => (isAudit ? audited[c] : String(run.steps[c]))), tickangle: 0,
          fixedrange: true, range: [-0.5, columns - 0.5], showgrid: false, zeroline: false, title: isAudit ? undefined : { text: "optimizer step", standoff: 6 } },
        yaxis: { tickvals: y.tickvals, ticktext: y.ticktext, fixedrange: true, range: [run.layers.length - 0.5, -0.5], showgrid: false, zeroline: false },
      }), CONFIG);
      part("rows-note").textContent = y.isNumbered ? "Rows are layers, numbered in model order." : rowsNote(run);
      node.setAttribute("aria-label", "Map of layers by steps. " + section.dataset.verdict);
      if (!node.isWired) {
        node.isWired = true;
        node.on("plotly_click", (event) => {
          const point = event.points[0];
          state.layer = run.layers[Math.round(point.y)];
          if (!run.isAudit) state.column = Math.round(point.x);
          layerChoice.value = state.layer; slider.value = state.column;
          update();
        });
      }
    }

    function columnOf(step) {
      const found = run.steps.findIndex((one) => one >= step);
      return found < 0 ? run.steps.length - 1 : found;
    }

    function headsMap() {
      const node = part("heads-map"), heads = run.heads[rowOf(state.layer)], kept = run.matrices[state.layer] || {};
      const step = run.steps[state.column];
      const steps = Object.keys(kept).map(Number).sort((a, b) => a - b);
      const usable = steps.filter((one) => one <= step);
      const from = usable.length ? usable[usable.length - 1] : null;
      const alert = run.alerted[state.layer];
      const isLast = state.column === run.steps.length - 1;
      const pair = pairAt(state.layer, state.column);
      // Of an alert that names more than two heads every pair among them is marked, as long as that can be read.
      const told = isLast && alert ? (alert.groups.length ? alert.groups : [alert.heads]).filter((group) => group.length > 1) : [];
      const pairs = told.flatMap((group) => group.flatMap((one, place) => group.slice(place + 1).map((other) => [one, other])));
      const marked = pairs.length && pairs.length <= 15 ? pairs : pair ? [pair] : [];
      const bold = [...new Set(marked.flat())];
      const value = valueAt(Object.keys(run.quantities)[0], state.layer, state.column);
      const words = state.layer + (run.isAudit ? "" : ", step " + step) + ": " +
        (pair ? named(pair) + (value >= LIMITS.pair ? " are nearly one head" : " are the closest") + " (alignment " + number(value) + ")." : "no pair of heads was compared.") +
        (bold.length > 2 ? " Marked are heads " + bold.slice(0, -1).join(", ") + " and " + bold[bold.length - 1] + "." : "");
      const z = from === null || heads < 2 ? [] : unpack(kept[from], heads);
      const isEmpty = !z.some((row) => row.some((entry) => entry !== null));
      const stale = !isEmpty && from !== step && !run.isAudit ? " The map is of step " + from + ", the last that was kept until then." : "";
      const missing = from === null && heads > 1 ? " The overlaps of all pairs were not kept up to this step." : "";
      part("pair").textContent = words + stale + missing;
      node.style.display = isEmpty ? "none" : "";
      if (isEmpty) return;
      const side = Math.min(width(node), 560), margin = 34, room = side - margin - 10;
      const isAlerted = Boolean(alert) && isLast, ring = css(isAlerted ? "--ring" : "--grey");
      const label = (head) => (bold.includes(head) ? '<b><span style="color:' + css(isAlerted ? "--bad" : "--ink") + '">' + head + "</span></b>" : String(head));
      const axis = (pixels) => {
        const places = ticks(heads, bold, pixels / (room / heads));
        return { tickvals: places, ticktext: places.map(label), tickangle: 0, fixedrange: true, showgrid: false, zeroline: false };
      };
      const traces = [{
        type: "heatmap", z: z, colorscale: "Cividis", zmin: 0, zmax: 1, showscale: false, hoverongaps: false,
        xgap: heads <= 40 ? 1 : 0, ygap: heads <= 40 ? 1 : 0, hovertemplate: "heads %{y} and %{x}: %{z:.2f}<extra></extra>",
      }];
      if (marked.length) {
        const size = Math.max(14, Math.min(34, room / heads + 4));
        const x = marked.flatMap((one) => [one[0], one[1]]), y = marked.flatMap((one) => [one[1], one[0]]);
        traces.push({ type: "scatter", mode: "markers", x: x, y: y, hoverinfo: "skip", marker: { symbol: "circle-open", size: size, color: "#ffffff", line: { width: 6 } } });
        traces.push({ type: "scatter", mode: "markers", x: x, y: y, hoverinfo: "skip", marker: { symbol: "circle-open", size: size, color: ring, line: { width: 3 } } });
      }
      Plotly.react(node, traces, base({
        width: side, height: side + 16, margin: { l: margin, r: 10, t: 6, b: margin + 16 },
        xaxis: Object.assign({ range: [-0.5, heads - 0.5], title: { text: headWord(), standoff: 4 } }, axis(10 + 8 * String(heads).length)),
        yaxis: Object.assign({ range: [heads - 0.5, -0.5] }, axis(16)),
      }), CONFIG);
      node.setAttribute("aria-label", "Map of heads by heads. " + words);
    }

    function spectra() {
      const node = part("spectra"), kept = run.spectra[state.layer] || {};
      const step = run.steps[state.column];
      const steps = Object.keys(kept).map(Number).sort((a, b) => a - b);
      const usable = steps.filter((one) => one <= step);
      const from = usable.length ? usable[usable.length - 1] : steps[0];
      node.style.display = from === undefined ? "none" : "";
      if (from === undefined) { part("spectra-note").textContent = "The spectra of this layer were not kept."; return; }
      const isMeasured = kept[from].some((value) => value !== null);
      node.style.display = isMeasured ? "" : "none";
      if (!isMeasured) { part("spectra-note").textContent = state.layer + (run.isAudit ? "" : ", step " + from) + ": not measured."; return; }
      const values = kept[from], pair = pairAt(state.layer, state.column) || [];
      const room = width(node) - 58;
      const places = ticks(values.length, pair, (10 + 8 * String(values.length).length) / (room / values.length));
      Plotly.react(node, [{ type: "bar", x: values.map((_, head) => head), y: values, marker: { color: values.map((_, head) => (pair.includes(head) ? css(run.alerted[state.layer] ? "--ring" : "--other") : css("--accent"))) },
        hovertemplate: "head %{x}: %{y} directions<extra></extra>" }], base({
        plot_bgcolor: "rgba(0,0,0,0)", width: width(node), height: 220, margin: { l: 44, r: 14, t: 8, b: 48 }, bargap: 0.25,
        xaxis: { tickvals: places, ticktext: places.map(String), tickangle: 0, fixedrange: true, title: { text: headWord(), standoff: 4 }, zeroline: false },
        yaxis: { fixedrange: true, rangemode: "tozero", gridcolor: css("--line"), zeroline: false, nticks: 5 },
      }), CONFIG);
      const low = values.indexOf(Math.min(...values.filter((value) => value !== null)));
      const words = state.layer + (run.isAudit ? "" : ", step " + from) + ": head " + low + " uses the fewest directions (" + number(values[low], 1) + " of " + (run.widths[rowOf(state.layer)] || "its width") + ")." + (pair.length ? " The closest pair has another colour." : "");
      part("spectra-note").textContent = words;
      node.setAttribute("aria-label", "Directions over which each head spreads its energy. " + words);
    }

    function timeline() {
      const node = part("timeline");
      if (!node) return;
      const worst = run.maps[Object.keys(run.quantities)[0]].values;
      const top = run.steps.map((_, column) => {
        const known = worst.map((row) => row[column]).filter((value) => value !== null);
        return known.length ? Math.max(...known) : null;
      });
      const hasLoss = run.losses.length > 0;
      const lowest = Math.min(-0.02, ...top.filter((value) => value !== null).map((value) => value - 0.05));
      const traces = [{ type: "scatter", mode: run.steps.length < 30 ? "lines+markers" : "lines", x: run.steps, y: top, yaxis: "y", line: { color: css("--accent"), width: 2 }, hovertemplate: "step %{x}: closest pair of all layers %{y:.2f}<extra></extra>" }];
      run.losses.forEach((curve, place) => traces.push({ type: "scatter", mode: "lines", x: curve.steps, y: curve.values, yaxis: "y2", line: { color: css("--ink"), width: 1.5, dash: place ? "dot" : "solid" }, hovertemplate: escaped(curve.name) + " %{y:.4g} at step %{x}<extra></extra>" }));
      const mark = (items, symbol, colour, height) => traces.push({ type: "scatter", mode: "markers", x: items.map((item) => item.step), y: items.map(height), yaxis: "y",
        text: items.map((item) => wrapped(escaped(item.message))), hoverinfo: "text", marker: { symbol: symbol, size: 11, color: colour, line: { color: css("--paper"), width: 1 } } });
      const levelAt = (item) => { const row = rowOf(item.layer); const value = row < 0 ? null : worst[row][columnOf(item.step)]; return value === null ? 0 : Math.max(0, value); };
      mark(run.alerts.filter((alert) => !alert.isResolved && alert.level !== "notice"), "triangle-up", css("--bad"), levelAt);
      mark(run.alerts.filter((alert) => alert.isResolved), "triangle-down", css("--good"), levelAt);
      mark(run.actions, "diamond", "#b87000", () => 1.06);
      const shapes = [LIMITS.pair, LIMITS.mean].map((y) => ({ type: "line", xref: "paper", x0: 0, x1: 1, yref: "y", y0: y, y1: y, line: { color: css("--soft"), width: 1, dash: "dash" } }));
      run.actions.slice(0, 40).forEach((action) => shapes.push({ type: "line", x0: action.step, x1: action.step, yref: "paper", y0: 0, y1: 1, line: { color: "#b87000", width: 1, dash: "dot" } }));
      Plotly.react(node, traces, base({
        plot_bgcolor: "rgba(0,0,0,0)", width: width(node), height: hasLoss ? 340 : 220, margin: { l: 48, r: 14, t: 10, b: 48 }, shapes: shapes,
        xaxis: { fixedrange: true, title: { text: "optimizer step", standoff: 4 }, gridcolor: css("--line"), zeroline: false, nticks: width(node) < 500 ? 5 : 10, tickangle: 0, anchor: "y" },
        yaxis: { domain: hasLoss ? [0, 0.5] : [0, 1], range: [lowest, 1.12], tickvals: [0, 0.5, 0.8, 1], fixedrange: true, gridcolor: css("--line"), zeroline: false },
        yaxis2: { domain: [0.58, 1], fixedrange: true, gridcolor: css("--line"), zeroline: false, nticks: 5, visible: hasLoss },
      }), CONFIG);
      node.setAttribute("aria-label", "What happened when. " + section.dataset.verdict);
    }

    function update() {
      part("step-words").textContent = run.isAudit ? "" : "step " + run.steps[state.column];
      slider.setAttribute("aria-valuetext", "step " + run.steps[state.column]);
      layersMap(); headsMap(); spectra();
    }

    layerChoice.addEventListener("change", () => { state.layer = layerChoice.value; update(); });
    quantityChoice.addEventListener("change", () => { state.quantity = quantityChoice.value; update(); });
    slider.addEventListener("input", () => { state.column = Number(slider.value); update(); });
    if (run.isAudit || run.steps.length < 2) slider.closest("label").style.display = "none";
    if (run.isAudit) quantityChoice.closest("label").style.display = "none";
    return () => { update(); timeline(); };
  }

  function wrapped(text) {
    return text.split(" ").reduce((lines, word) => {
      const last = lines[lines.length - 1];
      if (last.length + word.length > 44) lines.push(word); else lines[lines.length - 1] = last ? last + " " + word : word;
      return lines;
    }, [""]).join("<br>");
  }

  function rowsNote(run) {
    const row = run.labels.findIndex((label, place) => label !== run.layers[place]);
    return row < 0 ? "" : "Row " + run.labels[row] + " is " + run.layers[row] + ".";
  }

  const redraws = runs.map((run, place) => draw(run, document.getElementById("run-" + place))).filter(Boolean);
  const all = () => redraws.forEach((redraw) => redraw());
  all();
  let waiting = null, lastWidth = window.innerWidth;
  document.querySelectorAll("td.layer, .differences th, .differences td").forEach((cell) => {
    cell.innerHTML = cell.innerHTML.replace(/\.(?=[a-z_])/gi, ".<wbr>");  // long names break after a dot
  });
  window.addEventListener("resize", () => {
    if (window.innerWidth === lastWidth) return;
    lastWidth = window.innerWidth;
    clearTimeout(waiting); waiting = setTimeout(all, 120);
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  window.addEventListener("beforeprint", () => { isPrinting = true; all(); });
  window.addEventListener("afterprint", () => { isPrinting = false; all(); });
  document.documentElement.dataset.drawn = "yes";
})();
