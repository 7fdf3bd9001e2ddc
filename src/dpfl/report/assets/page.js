"use strict";
// Draws the figures, sorts and filters tables, and, where the page is live, asks for news.
const PAPER_WIDTH = 335;  // pixels; two figures side by side on a sheet of A4
const bar = window.matchMedia("(hover: hover)").matches ? "hover" : false;  // else it would lie on the legend for good
const settings = {
  responsive: true,
  displaylogo: false,
  displayModeBar: bar,
  modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d", "sendChartToCloud"],
  showSendToCloud: false,
  plotlyServerURL: "",
  toImageButtonOptions: { format: "svg" },  // a PNG would be drawn from an address that the page's policy refuses
};

function fitted(place, figure) {
  // Legends stand above the lines and take the room their names need.
  const narrow = window.innerWidth < 640;
  const layout = figure.layout;
  const names = figure.data.filter((one) => one.showlegend !== false).length;
  const rows = layout.showlegend ? Math.ceil(names / (narrow ? 2 : 3)) : 0;
  place.style.height = (narrow ? 280 : 310) + 20 * rows + "px";
  return narrow ? { ...layout, font: { ...layout.font, size: 11 }, margin: { ...layout.margin, l: 48, r: 8 } } : layout;
}

function draw(figures) {
  for (const [name, figure] of Object.entries(figures)) {
    const place = document.getElementById("figure-" + name);
    if (place) Plotly.react(place, figure.data, fitted(place, figure), settings);
  }
}

function dressTables(root) {
  for (const field of root.querySelectorAll("input.filter")) {
    field.addEventListener("input", () => {
      const wanted = field.value.toLowerCase();
      for (const row of document.getElementById(field.dataset.table).tBodies[0].rows) {
        row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
      }
    });
  }
  for (const table of root.querySelectorAll("table.sortable")) {
    table.querySelectorAll("thead th").forEach((heading, column) => {
      heading.addEventListener("click", () => {
        const rows = [...table.tBodies[0].rows];
        const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
        const rising = heading.dataset.order !== "rising";
        heading.dataset.order = rising ? "rising" : "falling";
        rows.sort((a, b) => {
          const [x, y] = [value(a), value(b)];
          const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
          return rising ? order : -order;
        });
        table.tBodies[0].append(...rows);
      });
    });
  }
}

function widen() {
  // Paper has its own width, and nothing folded away.
  document.querySelectorAll("details").forEach((one) => { one.dataset.was = one.open ? "open" : ""; one.open = true; });
  document.querySelectorAll(".plot").forEach((one) => { if (one.data) Plotly.relayout(one, { width: PAPER_WIDTH }); });
}

function restore() {
  document.querySelectorAll("details").forEach((one) => { one.open = one.dataset.was === "open"; });
  document.querySelectorAll(".plot").forEach((one) => { if (one.data) Plotly.relayout(one, { width: null, autosize: true }); });
}

function replaceWords(parts) {
  const asked = Object.keys(parts);
  const here = [...document.querySelectorAll("section[data-part]")].map((one) => one.dataset.part);
  if (asked.join() !== here.join()) return false;
  for (const [part, html] of Object.entries(parts)) {
    const section = document.querySelector(`section[data-part="${part}"]`);
    const fresh = document.createElement("div");
    fresh.innerHTML = html;
    const ids = (root) => [...root.querySelectorAll(".plot")].map((one) => one.id).join();
    if (ids(fresh) !== ids(section)) return false;
    const opened = [...section.querySelectorAll("details")].map((one) => one.open);
    for (const old of section.querySelectorAll(".plot")) {
      fresh.querySelector("#" + CSS.escape(old.id)).replaceWith(old);  // keeps zoom and hover
    }
    section.replaceChildren(...fresh.childNodes);
    section.querySelectorAll("details").forEach((one, number) => { one.open = opened[number] ?? one.open; });
    dressTables(section);
  }
  return true;
}

async function follow(address) {
  let seen = document.body.dataset.version;
  for (;;) {
    await new Promise((done) => setTimeout(done, 1000));
    let news;
    try {
      news = await (await fetch(address, { cache: "no-store" })).json();
    } catch (error) {
      document.body.dataset.connection = "lost";
      continue;
    }
    document.body.dataset.connection = "live";
    if (news.version === seen) continue;
    seen = news.version;
    if (!replaceWords(news.parts)) {
      const sections = Object.entries(news.parts).map(([part, html]) => {
        const section = document.createElement("section");
        section.dataset.part = part;
        section.innerHTML = html;
        return section;
      });
      document.getElementById("parts").replaceChildren(...sections);
      dressTables(document);
    }
    draw(news.figures);
    document.querySelector("h1").textContent = news.title;
    document.title = news.title + " - dpfl";
    document.body.dataset.version = seen;
    if (news.finished) return;
  }
}

window.addEventListener("beforeprint", widen);
window.addEventListener("afterprint", restore);
dressTables(document);
draw(JSON.parse(document.getElementById("figures").textContent));
document.body.dataset.drawn = "yes";
if (document.body.dataset.live) follow(document.body.dataset.live);
