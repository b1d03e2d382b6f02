"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("js");

  const theme = document.getElementById("theme");
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const label = () => { theme.textContent = dark() ? "Light" : "Dark"; theme.setAttribute("aria-pressed", String(dark())); };
  theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; label(); });
  label();

  const table = document.getElementById("table");
  if (!table) return;
  const bodies = () => [...table.tBodies];

  const setOpen = (body, open) => {
    body.querySelector("button.open").setAttribute("aria-expanded", String(open));
    body.querySelector("tr.detail").hidden = !open;
    if (open) body.querySelectorAll(".canvas").forEach(prepare);
  };
  const isOpen = (body) => body.querySelector("button.open").getAttribute("aria-expanded") === "true";

  for (const body of bodies()) {
    body.querySelector("tr.summary").addEventListener("click", () => {
      if (!String(getSelection())) setOpen(body, !isOpen(body));
    });
  }

  const expand = document.getElementById("expand");
  expand.addEventListener("click", () => {
    const visible = bodies().filter((body) => !body.hidden);
    const open = !visible.every(isOpen);
    visible.forEach((body) => setOpen(body, open));
    expand.textContent = open ? "Close all" : "Open all";
  });

  const numeric = new Set(["bytes", "share"]);
  for (const head of table.querySelectorAll("th[data-key]")) {
    head.querySelector("button").addEventListener("click", () => {
      const key = head.dataset.key;
      const first = numeric.has(key) ? "descending" : "ascending";
      const second = first === "ascending" ? "descending" : "ascending";
      const order = head.getAttribute("aria-sort") === first ? second : first;
      table.querySelectorAll("th[data-key]").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const compare = numeric.has(key)
        ? (a, b) => Number(a.dataset[key]) - Number(b.dataset[key])
        : (a, b) => a.dataset[key].localeCompare(b.dataset[key], undefined, { numeric: true });
      bodies().sort((a, b) => sign * compare(a, b)).forEach((body) => table.append(body));
    });
  }

  const filters = document.getElementById("filters");
  const search = document.getElementById("search");
  const shown = document.getElementById("shown");
  const chosen = (name) => {
    const boxes = [...filters.querySelectorAll(`input[name="${name}"]`)];
    return boxes.length ? new Set(boxes.filter((box) => box.checked).map((box) => box.value)) : null;
  };
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const treatments = chosen("treatment");
    const phases = chosen("phase");
    let count = 0;
    for (const body of bodies()) {
      const text = body.dataset.text.toLowerCase();
      const keep = (!treatments || treatments.has(body.dataset.treatment)) && (!phases || phases.has(body.dataset.phase))
        && words.every((word) => text.includes(word));
      body.hidden = !keep;
      count += keep;
    }
    shown.textContent = `${count} of ${bodies().length} rows`;
  };
  filters.addEventListener("input", filter);
  filters.addEventListener("submit", (event) => event.preventDefault());

  const views = new WeakMap();
  function prepare(canvas) {
    if (views.has(canvas)) return;
    const svg = canvas.querySelector("svg");
    const full = svg.viewBox.baseVal;
    const home = { x: full.x, y: full.y, w: full.width, h: full.height };
    let view = { ...home };
    const show = () => svg.setAttribute("viewBox", `${view.x} ${view.y} ${view.w} ${view.h}`);
    const zoom = (factor, fx = 0.5, fy = 0.5) => {
      const w = Math.min(home.w * 4, Math.max(60, view.w * factor));
      const real = w / view.w;
      view = { x: view.x + view.w * (1 - real) * fx, y: view.y + view.h * (1 - real) * fy, w, h: view.h * real };
      show();
    };
    const move = (dx, dy) => { view.x += dx * view.w; view.y += dy * view.h; show(); };
    const fit = () => {
      const { width, height } = canvas.getBoundingClientRect();
      const scale = Math.max(home.w / width, home.h / height, 1);
      const w = width * scale, h = height * scale;
      view = { x: home.x - (w - home.w) / 2, y: home.y - (h - home.h) / 2, w, h };
      show();
    };
    views.set(canvas, { zoom, fit });
    fit();
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && document.activeElement !== canvas) return;
      event.preventDefault();
      const box = canvas.getBoundingClientRect();
      zoom(event.deltaY > 0 ? 1.15 : 1 / 1.15, (event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); canvas.focus(); });
    canvas.addEventListener("pointermove", (event) => {
      if (!canvas.hasPointerCapture(event.pointerId)) return;
      const box = canvas.getBoundingClientRect();
      move(-event.movementX / box.width, -event.movementY / box.height);
    });
    const keys = {
      "+": () => zoom(1 / 1.25), "=": () => zoom(1 / 1.25), "-": () => zoom(1.25), "0": fit,
      ArrowLeft: () => move(-0.1, 0), ArrowRight: () => move(0.1, 0), ArrowUp: () => move(0, -0.1), ArrowDown: () => move(0, 0.1),
    };
    canvas.addEventListener("keydown", (event) => {
      const action = keys[event.key];
      if (action) { event.preventDefault(); action(); }
    });
    canvas.closest("figure").querySelectorAll("[data-zoom]").forEach((button) => button.addEventListener("click", () => {
      ({ in: () => zoom(1 / 1.25), out: () => zoom(1.25), fit })[button.dataset.zoom]();
    }));
  }

  bodies().forEach((body, index) => setOpen(body, bodies().length === 1 && index === 0));
})();
