// Filters and figures of the page. Each part (main.run) has filters of its own; figures are drawn when they come into view.
"use strict";
(() => {
  const specs = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;

  function chosen(part) {
    const value = (name) => part.querySelector(`[data-filter=${name}]`).value;
    const boxes = part.querySelectorAll("[data-filter=system]:checked");
    return { systems: new Set([...boxes].map((box) => box.value)), model: value("model"), place: value("place") };
  }

  // What a trace or a row says of itself; what it does not say fits everything. `part`: a share of the whole, shown with all.
  function fits(of, filter) {
    return (of.system === undefined || filter.systems.has(of.system))
      && (of.model === undefined || of.model === filter.model)
      && (of.part === undefined || filter.model === "" || of.part === "" || of.part === filter.model)
      && (of.place === undefined || String(of.place) === filter.place)
      && (of.facet === undefined || String(of.facet) === filter.facet);
  }

  function themed(layout) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    return {
      ...layout,
      title: undefined,  // it stands above the figure
      font: { ...layout.font, color: colour("--text") },
      hoverlabel: { bgcolor: colour("--panel") },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--text") },
      dragmode: touch ? false : "zoom",
    };
  }

  const config = { responsive: true, displaylogo: false, displayModeBar: touch ? true : "hover",
    modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]] };

  function draw(box) {
    const part = box.closest("main");
    const filter = chosen(part);
    const facet = part.querySelector(`[data-facet="${CSS.escape(box.dataset.sweep ?? "")}"]`);
    filter.facet = facet ? facet.value : "0";
    const name = box.dataset.figure + ("byPlace" in box.dataset ? `/${filter.place}` : "");
    const spec = specs[name];
    if (!spec) {
      Plotly.purge(box);
      box.textContent = "Nothing to show at this place.";
      return;
    }
    if (!box.classList.contains("js-plotly-plot")) box.textContent = "";
    const traces = spec.data.filter((trace) => fits(trace.meta, filter)).map((trace) => ({ ...trace, visible: true }));
    const height = spec.layout.height ?? ("bare" in box.dataset ? 280 : 330);
    box.style.height = `${height}px`;
    const legend = "bare" in box.dataset ? { showlegend: false } : {};  // one legend stands above the row
    Plotly.react(box, traces, themed({ ...spec.layout, ...legend, height }), config);
  }

  const inView = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) { inView.add(target); if (target.dataset.stale !== "no") refresh(target); }
      else inView.delete(target);
    }
  }, { rootMargin: "600px" });

  function refresh(box) {
    box.dataset.stale = "no";
    draw(box);
  }

  function apply(part) {
    const filter = chosen(part);
    const place = part.querySelector("[data-filter=place]").selectedOptions[0].textContent;
    const several = part.querySelector("[data-filter=place]").options.length > 1;
    for (const line of part.querySelectorAll(".where")) line.textContent = several ? `At ${place}.` : "";
    for (const row of part.querySelectorAll("tr[data-system], details[data-system], section[data-system], .legend [data-system]")) {
      const { system, model, place } = row.dataset;
      row.hidden = !fits({ system, part: model, place }, filter);
    }
    redraw(part);
  }

  function redraw(part) {
    for (const box of part.querySelectorAll(".figure")) {
      box.dataset.stale = "yes";
      if (inView.has(box)) refresh(box);
    }
  }

  for (const part of document.querySelectorAll("main.run")) {
    part.addEventListener("change", () => apply(part));
    apply(part);
    for (const box of part.querySelectorAll(".figure")) watcher.observe(box);
  }
  dark.addEventListener("change", () => document.querySelectorAll("main.run").forEach(redraw));
})();
