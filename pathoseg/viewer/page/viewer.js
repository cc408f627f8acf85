// The viewer's page: a gallery of slides, and one slide with its layers, tables and keys.
"use strict";

const UNREAD = 255;
const MAGNIFICATIONS = [1, 2, 5, 10, 20, 40];
const MICRONS_AT_1X = 10; // a pixel of the screen at 1×, as objectives are named
const POLL_MS = 2000;

const at = (id) => document.getElementById(id);
const round = (value, digits) => Number(value).toLocaleString("en", { maximumFractionDigits: digits });

let slides = []; // of the gallery
let slide = null; // the details of the one that is shown
let osd = null; // OpenSeadragon's viewer
let target = null; // the number of the slide that is shown or on its way, null for the gallery
let opening = 0; // grows with each slide: answers to an earlier one are dropped
let leaving = new AbortController(); // ends what is asked for here, as a slide or the gallery is left
let poll = null;
const KINDS = ["probability", "prediction", "truth", "difference"]; // the undermost first
const layers = new Map(); // kind -> { shown, item, wanted }: what is seen, the newest, its query and opacity

const state = {
  prediction: true, opacity: 0.5, style: "filled", 
  hidden: new Set(), // names of classes, which stay hidden on the next slide; UNREAD for what is unread
  truth: false, difference: false, swipe: false, swipeAt: 0.5, probability: -1,
  tab: "layers", table: "regions", sort: "area", order: "desc", className: "", page: 0,
};

// --- small things ---------------------------------------------------------------------------

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

async function get(path, signal = leaving.signal) {
  let answer, text;
  try {
    answer = await fetch(path, { signal });
    text = await answer.text();
  } catch {
    if (signal?.aborted) return new Promise(() => {}); // nobody waits for it any more
    throw new Error("The viewer in the terminal has ended.");
  }
  if (answer.status === 403) throw new Error(text);
  let found = { problem: `The viewer answers ${answer.status}.`, hint: "" };
  try { found = JSON.parse(text); } catch { /* it is told so */ }
  if (!answer.ok) throw new Error(`${found.problem} ${found.hint}`.trim());
  return found;
}

// A browser has six requests to a host under way: those of what is left would hold up the next.
function leave(next) {
  target = next;
  opening += 1;
  clearInterval(poll);
  leaving.abort();
  leaving = new AbortController();
  for (const { picture } of cards.filter((one) => !isFilled(one))) {
    for (const image of picture.children) image.removeAttribute("src"); // ends its request
    picture.replaceChildren();
  }
  return opening;
}

let toastTimer = null;
function toast(text) {
  at("toast").textContent = text;
  at("toast").hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { at("toast").hidden = true; }, 5000);
}

function told(promise) {
  return promise.catch((error) => toast(error.message));
}

const colourOf = ([red, green, blue]) => `rgb(${red} ${green} ${blue})`;

function dot(colour) {
  const mark = make("i", { className: "dot" });
  if (colour) mark.style.background = colourOf(colour); else mark.classList.add("hatch");
  return mark;
}

function area(mm2) {
  if (mm2 === null || mm2 === undefined) return "";
  return mm2 >= 0.01 || mm2 === 0 ? `${round(mm2, 2)} mm²` : `${round(mm2 * 1e6, 0)} µm²`;
}

// --- the gallery ----------------------------------------------------------------------------

const STATES = { done: "done", begun: "being segmented", failed: "failed", "cut short": "cut short" };

function card(entry) {
  const picture = make("div", { className: "picture" });
  const body = make("div", { className: "body" });
  if (STATES[entry.status]) {
    body.append(make("span", { className: `state ${entry.status}`, textContent: STATES[entry.status] }));
  }
  body.append(make("div", { className: "name", textContent: entry.name }));
  const rows = (entry.areas || []).map((one) => make("tr", {},
    make("td", { textContent: one.name }),
    make("td", { textContent: area(one.area_mm2) }),
    make("td", { className: "soft", textContent: `${round(100 * one.share_of_tissue, 1)} %` })));
  if (entry.unread_mm2 > 0) {
    rows.push(make("tr", {}, make("td", {}, dot(null), "unread"), make("td", { textContent: area(entry.unread_mm2) }), make("td")));
  }
  const table = make("table", {}, ...rows);
  body.append(table);
  if (entry.annotated) body.append(make("div", { className: "soft", textContent: "annotated" }));
  for (const text of [entry.problem, ...(entry.warnings || [])].filter(Boolean)) {
    body.append(make("div", { className: "told", textContent: text }));
  }
  const button = make("button", { className: "slide-card", type: "button" }, picture, body);
  button.dataset.name = entry.name;
  button.addEventListener("click", () => told(showSlide(entry.id)));
  return { button, picture, table, body, entry };
}

function isFilled({ details, picture }) {
  const images = [...picture.children];
  return details && (details.failed || images.length && images.every((image) => image.complete));
}

async function fillCard(one) {
  const { picture, entry } = one;
  const base = `api/slides/${entry.id}`;
  if (!one.details) await fillTexts(one, base);
  if (one.details.failed) return;
  picture.append(make("img", { src: `${base}/thumbnail/slide`, alt: "" }));
  if (one.details.prediction) picture.append(make("img", { src: `${base}/thumbnail/prediction`, alt: "" }));
}

async function fillTexts(one, base) {
  one.details = await get(base).catch((error) => ({ failed: true, classes: [], problems: [error.message] }));
  one.details.classes.forEach((each, row) => one.table.rows[row]?.cells[0].prepend(dot(each.colour)));
  if (one.entry.problem) return;
  one.details.problems.forEach((text) => one.body.append(make("div", { className: "told", textContent: text })));
}

let cards = [];
// Files are opened for those in sight alone.
const watcher = new IntersectionObserver((seen) => {
  for (const { isIntersecting, target: button } of seen) {
    if (!isIntersecting) continue;
    watcher.unobserve(button);
    fillCard(cards.find((one) => one.button === button));
  }
}, { root: at("gallery"), rootMargin: "200px" });

function drawGallery() {
  cards = slides.map(card);
  at("cards").replaceChildren(...cards.map((one) => one.button));
  cards.forEach((one) => watcher.observe(one.button));
  filterGallery();
}

function filterGallery() {
  const words = at("filter").value.toLowerCase();
  let shown = 0;
  for (const button of at("cards").children) {
    button.hidden = !button.dataset.name.toLowerCase().includes(words);
    shown += !button.hidden;
  }
  at("count").textContent = `${shown} of ${slides.length} slides`;
}

function showGallery(asked) {
  leave(null);
  slide = null;
  document.title = "pathoseg";
  at("title").textContent = "";
  at("slide").hidden = true;
  at("gallery").hidden = false;
  cards.filter((one) => !isFilled(one)).forEach((one) => watcher.observe(one.button));
  document.querySelectorAll(".of-slide").forEach((one) => { one.hidden = true; });
  if (asked) history.pushState(null, "", location.pathname);
  else history.replaceState(null, "", location.pathname);
}

// --- a slide --------------------------------------------------------------------------------

const base = () => `api/slides/${slide.id}`;
const level0 = () => osd.world.getItemAt(0);

function source(kind, query = "") {
  const { id, width, height, tile, halvings } = slide;
  const made = new OpenSeadragon.TileSource({ width, height, tileSize: tile, tileOverlap: 0, minLevel: 0, maxLevel: halvings });
  const size = (level) => 2 ** (halvings - level);
  made.getTileUrl = (level, x, y) => `api/slides/${id}/tile/${kind}/${halvings - level}/${x}/${y}${query}`;
  // The last column and row may stand out by part of a pixel: drawn as large as they are,
  // they lie where they belong.
  made.getTileBounds = (level, x, y, isSource) => {
    const step = size(level);
    const w = Math.min(tile, Math.ceil(width / step) - x * tile);
    const h = Math.min(tile, Math.ceil(height / step) - y * tile);
    if (isSource) return new OpenSeadragon.Rect(0, 0, w, h);
    const scale = step / width;
    return new OpenSeadragon.Rect(x * tile * scale, y * tile * scale, w * scale, h * scale);
  };
  return made;
}

function makeViewer() {
  // OpenSeadragon looks for this element before it adds an inline style, which the page's policy
  // forbids (the style stands in viewer.css). In another namespace it is no style to the browser.
  const mark = document.createElementNS("urn:pathoseg", "style");
  mark.setAttribute("data-openseadragon-mobile-css", "true");
  document.head.append(mark);
  osd = OpenSeadragon({
    element: at("view"),
    drawer: "canvas",
    showNavigationControl: false,
    showNavigator: true,
    navigatorPosition: "TOP_RIGHT",
    navigatorSizeRatio: 0.17,
    navigatorBackground: "#ffffff",
    navigatorBorderColor: "#dfe3ea",
    navigatorDisplayRegionColor: "#7b3f98",
    navigatorOpacity: 0.95,
    animationTime: 0.35,
    blendTime: 0,
    immediateRender: true,
    visibilityRatio: 0.25,
    minZoomImageRatio: 0.7,
    zoomPerScroll: 1.35,
    smoothTileEdgesMinZoom: Infinity,
    subPixelRoundingForTransparency: OpenSeadragon.SUBPIXEL_ROUNDING_OCCURRENCES.ALWAYS,
    maxImageCacheCount: 300,
    imageLoaderLimit: 8,
    gestureSettingsMouse: { clickToZoom: false, dblClickToZoom: true },
    gestureSettingsTouch: { clickToZoom: false },
  });
  osd.addHandler("update-viewport", drawMarks);
  osd.addHandler("resize", drawMarks);
  osd.addHandler("animation-finish", keepPlace);
  osd.addHandler("tile-load-failed", () => askStatus());
  osd.addHandler("canvas-click", (event) => {
    if (event.quick) told(select(imagePoint(event.position)));
  });
  osd.addHandler("canvas-key", (event) => {
    // Arrows are OpenSeadragon's; all else is ours, wherever the focus is.
    event.preventDefaultAction = !event.originalEvent.key.startsWith("Arrow");
  });
  at("stage").addEventListener("mousemove", (event) => showPlace(event));
  at("stage").addEventListener("mouseleave", () => { at("place").textContent = ""; });
  at("swipe-line").addEventListener("pointerdown", (event) => at("swipe-line").setPointerCapture(event.pointerId));
  at("swipe-line").addEventListener("pointermove", (event) => {
    if (!event.buttons) return;
    const box = at("stage").getBoundingClientRect();
    state.swipeAt = Math.min(0.98, Math.max(0.02, (event.clientX - box.left) / box.width));
    drawMarks();
  });
  for (const times of MAGNIFICATIONS) {
    const button = make("button", { type: "button", textContent: `${times}×`, title: `An objective of ${times}×` });
    button.dataset.times = times;
    button.addEventListener("click", () => zoomTo(times));
    at("magnification").append(button);
  }
}

async function showSlide(id, place = null, linked = false) {
  const turn = leave(id);
  if (!linked) history.pushState(null, "", `#${encodeURIComponent(slides[id].name)}`);
  const details = await get(`api/slides/${id}`).catch((error) => ({ ...slides[id], failed: error.message }));
  if (turn !== opening) return;
  slide = details;
  showSelected(null);
  state.page = 0;
  state.className = "";
  state.probability = -1;
  document.title = `${slide.name} · pathoseg`;
  at("title").textContent = slide.name;
  at("gallery").hidden = true;
  at("slide").hidden = false;
  document.querySelectorAll(".of-slide").forEach((one) => { one.hidden = false; });
  for (const id of ["link", "magnification", "foot"]) at(id).hidden = Boolean(slide.failed);
  layers.clear();
  if (!osd) makeViewer();
  if (slide.failed) {
    osd.close();
    osd.canvas.blur();
    history.replaceState(null, "", `#${encodeURIComponent(slide.name)}`);
    drawProblems([slide.failed]);
    at("tabs").replaceChildren();
    at("tab-layers").replaceChildren();
    showTab("layers");
    return;
  }
  drawProblems([...(slide.problem ? [slide.problem] : []), ...slide.problems]);
  drawTabs();
  drawPanel();
  showTab(slide.tables.includes(state.tab) ? state.tab : "layers");
  osd.addOnceHandler("open", () => {
    osd.viewport.maxZoomPixelRatio = Math.max(4, slide.mpp[0] * 8);
    osd.viewport.goHome(true);
    if (place) moveTo(place.x, place.y, place.times, true);
    drawLayers();
    keepPlace();
    osd.canvas.focus(); // it moves by arrows
  });
  osd.open(source("slide"));
  poll = setInterval(askStatus, POLL_MS);
  if (slide.truth) {
    // Annotations may be large: their layers are asked for once they are read.
    get(`${base()}/truth`).then((found) => {
      if (turn !== opening) return;
      slide.classes = found.classes;
      slide.truthRead = true;
      if (!slide.prediction) state.truth = true;
      drawPanel();
      drawLayers();
    }).catch((error) => {
      if (turn === opening) drawProblems([...slide.problems, error.message]);
    });
  }
}

async function askStatus() {
  const turn = opening;
  try {
    const found = await get(`${base()}/status`);
    if (turn !== opening || !slide) return;
    drawProblems([...(slide.problem ? [slide.problem] : []), ...found.problems]);
  } catch (error) {
    if (turn === opening && slide) drawProblems([error.message]); // the next answer takes its place
  }
}

function drawProblems(problems) {
  const unlike = [...new Set([...problems, ...(slide.warnings || [])])];
  const shown = [...at("problems").children].map((one) => one.textContent);
  if (shown.join("\n") === unlike.join("\n")) return;
  at("problems").replaceChildren(...unlike.map((text) => make("p", { textContent: text })));
}

// --- layers ---------------------------------------------------------------------------------

const keyOf = (one) => (one.index === UNREAD ? UNREAD : one.name);

function shownClasses() {
  const all = [...slide.classes, { index: UNREAD }];
  return all.filter((one) => !state.hidden.has(keyOf(one))).map((one) => one.index).join(",");
}

// Lines have to be seen where areas let the tissue through.
const opacityOf = (style) => (style === "filled" ? state.opacity : Math.min(1, 2 * state.opacity));

// Prediction and annotations can be compared once the annotations are read, if they can be.
const compared = (how) => state[how] && slide.difference && slide.truthRead;

function wantedLayers() {
  const show = shownClasses();
  const differs = compared("difference");
  const both = compared("swipe");
  const wanted = new Map();
  if (slide.prediction && (state.prediction || both) && !differs) {
    wanted.set("prediction", { query: `?show=${show}&style=${state.style}`, opacity: opacityOf(state.style) });
  }
  if (slide.truthRead && (state.truth || both) && !differs) {
    const style = both || !slide.prediction ? state.style : "outlines";
    wanted.set("truth", { query: `?show=${show}&style=${style}`, opacity: opacityOf(style) });
  }
  if (differs) {
    wanted.set("difference", { query: `?show=${show}`, opacity: Math.max(0.3, state.opacity) });
  }
  if (state.probability >= 0) {
    wanted.set("probability", { query: `?channel=${state.probability}`, opacity: state.opacity });
  }
  return wanted;
}

function drawLayers() {
  if (!slide || !osd.isOpen()) return;
  const wanted = wantedLayers();
  for (const kind of KINDS) setLayer(kind, wanted.get(kind));
  drawMarks();
}

function remove(item) {
  if (item && osd.world.getIndexOfItem(item) >= 0) osd.world.removeItem(item);
}

function setLayer(kind, wanted) {
  const layer = layers.get(kind) || { shown: null, item: null, wanted: null };
  layers.set(kind, layer);
  const before = layer.wanted;
  layer.wanted = wanted || null;
  if (!wanted) {
    remove(layer.shown);
    remove(layer.item);
    layer.shown = layer.item = null;
    return;
  }
  if (before && before.query === wanted.query) {
    if (layer.shown) layer.shown.setOpacity(wanted.opacity);
    return;
  }
  const turn = opening;
  osd.addTiledImage({
    tileSource: source(kind, wanted.query),
    opacity: layer.shown ? 0 : wanted.opacity,
    preload: true,
    success: ({ item }) => {
      if (turn !== opening || layer.wanted?.query !== wanted.query) {
        remove(item);
        return;
      }
      if (layer.item !== layer.shown) remove(layer.item);
      layer.item = item;
      clips.delete(kind);
      // Keep the old item until the new one is loaded.
      const swap = () => {
        if (turn !== opening || layer.item !== item) return;
        if (layer.shown !== item) remove(layer.shown);
        layer.shown = item;
        item.setOpacity(layer.wanted.opacity);
        inOrder();
        drawMarks();
      };
      if (!layer.shown || item.getFullyLoaded()) swap();
      else item.whenFullyLoaded(swap);
    },
  });
}

function inOrder() {
  let index = 1; // the slide is 0
  for (const kind of KINDS) {
    const { shown, item } = layers.get(kind) || {};
    for (const one of new Set([shown, item])) {
      if (one && osd.world.getIndexOfItem(one) >= 0) osd.world.setItemIndex(one, index++);
    }
  }
}

// --- marks on top: scale bar, magnification, swipe line, the outline of what was clicked --------

const clips = new Map(); // kind -> where it was cut last

function cut(kind, left, right) {
  const item = layers.get(kind)?.item;
  const told = `${left} ${right}`;
  if (!item || clips.get(kind) === told) return;
  clips.set(kind, told);
  item.setClip(left <= 0 && right >= slide.width ? null : new OpenSeadragon.Rect(left, 0, right - left, slide.height));
}

function screenMicrons() {
  return slide.mpp[0] / level0().viewportToImageZoom(osd.viewport.getZoom(true));
}

function drawMarks() {
  if (!slide || !osd || !osd.isOpen() || !level0()) return;
  const microns = screenMicrons();
  const longest = 150 * microns;
  const power = 10 ** Math.floor(Math.log10(longest));
  const length = [5, 2, 1].map((one) => one * power).find((one) => one <= longest);
  at("scale-line").style.width = `${length / microns}px`;
  at("scale-text").textContent = length >= 1000 ? `${length / 1000} mm` : `${round(length, 2)} µm`;
  const times = MICRONS_AT_1X / microns;
  for (const button of at("magnification").children) {
    button.setAttribute("aria-pressed", Math.abs(times / button.dataset.times - 1) < 0.01);
  }
  const swipes = compared("swipe") && !compared("difference");
  at("swipe-line").hidden = !swipes;
  if (swipes) {
    const x = state.swipeAt * at("stage").clientWidth;
    at("swipe-line").style.left = `${x}px`;
    const cutAt = Math.min(slide.width, Math.max(0, imagePoint(new OpenSeadragon.Point(x, 0)).x));
    cut("prediction", 0, cutAt);
    cut("truth", cutAt, slide.width);
  } else {
    cut("prediction", 0, slide.width);
    cut("truth", 0, slide.width);
  }
  const corner = osd.viewport.pixelFromPoint(level0().imageToViewportCoordinates(0, 0, true), true);
  const scale = slide.mpp[0] / microns;
  at("outline").setAttribute("transform", `matrix(${scale} 0 0 ${scale} ${corner.x} ${corner.y})`);
}

function imagePoint(pixel) {
  return level0().viewportToImageCoordinates(osd.viewport.pointFromPixel(pixel, true), true);
}

function showPlace(event) {
  if (!slide || !osd.isOpen()) return;
  const box = at("stage").getBoundingClientRect();
  const point = imagePoint(new OpenSeadragon.Point(event.clientX - box.left, event.clientY - box.top));
  const inside = point.x >= 0 && point.y >= 0 && point.x < slide.width && point.y < slide.height;
  const [x, y] = [Math.floor(point.x), Math.floor(point.y)];
  const microns = `${round(point.x * slide.mpp[0], 1)}, ${round(point.y * slide.mpp[1], 1)} µm`;
  at("place").textContent = inside ? `${microns}  ·  ${x}, ${y} px` : "";
}

// --- moving, and links to a place -----------------------------------------------------------

function zoomTo(times) {
  osd.viewport.zoomTo(level0().imageToViewportZoom(slide.mpp[0] * times / MICRONS_AT_1X));
  osd.viewport.applyConstraints();
}

function zoomBy(factor) {
  osd.viewport.zoomBy(factor);
  osd.viewport.applyConstraints();
}

function moveTo(x, y, times, atOnce = false) {
  osd.viewport.zoomTo(level0().imageToViewportZoom(slide.mpp[0] * times / MICRONS_AT_1X), null, atOnce);
  osd.viewport.panTo(level0().imageToViewportCoordinates(x, y), atOnce);
}

function link() {
  const centre = level0().viewportToImageCoordinates(osd.viewport.getCenter(true), true);
  const times = MICRONS_AT_1X / screenMicrons();
  const numbers = [Math.round(centre.x), Math.round(centre.y), Number(times.toPrecision(4))];
  return `#${[encodeURIComponent(slide.name), ...numbers].join(",")}`;
}

function keepPlace() {
  if (!slide || !osd.isOpen()) return;
  // After Back the address is another slide's already, which is yet to be shown.
  const { found, given } = linked();
  const isHere = given ? found?.id === slide.id : slides.length === 1;
  if (isHere) history.replaceState(null, "", link());
}

function linked() {
  const [name, ...numbers] = location.hash.slice(1).split(",");
  const found = slides.find((one) => encodeURIComponent(one.name) === name || one.name === name);
  const [x, y, times] = numbers.map(Number);
  const place = [x, y, times].every(Number.isFinite) && times > 0 ? { x, y, times } : null;
  return { found, place, given: name !== "" };
}

async function follow() {
  const { found, place, given } = linked();
  if (found && slide?.id === target && found.id === target && place) moveTo(place.x, place.y, place.times);
  else if (found) await showSlide(found.id, place, true);
  else {
    if (given) toast("The slide of this link is not among those that are shown.");
    if (slides.length === 1 && !given) await showSlide(0, null, true);
    else showGallery(false);
  }
}

async function copyLink() {
  const address = new URL(link(), location.href).href;
  try {
    await navigator.clipboard.writeText(address);
    toast("Copied. It opens here, and for who has the viewer's address with its token.");
  } catch {
    toast(address);
  }
}

function step(by) {
  const listed = [...at("cards").children].filter((one) => !one.hidden).map((one) => one.dataset.name);
  const { name: here } = slides[target];
  const names = listed.includes(here) ? listed : slides.map((one) => one.name);
  const name = names[names.indexOf(here) + by];
  if (name === undefined) toast(by > 0 ? "This is the last slide." : "This is the first slide.");
  else told(showSlide(slides.findIndex((one) => one.name === name)));
}

// --- what was clicked -----------------------------------------------------------------------

async function select(point) {
  const turn = opening;
  const found = slide.tables.length ? await get(`${base()}/at?x=${point.x}&y=${point.y}`) : null;
  if (turn !== opening) return;
  if (found && found.reading !== undefined) {
    toast(`The outlines are being read (${round(found.reading, 0)} so far): click again soon.`);
    return;
  }
  showSelected(found);
}

function showSelected(found) {
  at("outline").setAttribute("d", found ? found.rings.map(path).join("") : "");
  at("card").hidden = !found;
  document.querySelectorAll("#table tr.chosen").forEach((row) => row.classList.remove("chosen"));
  if (!found) return;
  const one = slide.classes.find((each) => each.name === found.class);
  const rows = [
    ["Area", `${round(found.area_um2, 1)} µm²`],
    ["Position", `${round(found.x, 0)}, ${round(found.y, 0)} px`],
    ...Object.entries(found.measurements).filter(([name]) => name !== "Area µm^2")
      .map(([name, value]) => [name, round(value, Math.abs(value) < 10 ? 3 : 1)]),
  ];
  const close = make("button", { className: "close", textContent: "×", title: "Close (Esc)" });
  close.addEventListener("click", () => showSelected(null));
  at("card").replaceChildren(
    close,
    make("h3", {}, dot(one ? one.colour : [128, 128, 128]), found.class || "no class"),
    make("table", {}, ...rows.map(([name, value]) => make("tr", {}, make("td", { textContent: name }), make("td", { textContent: value })))));
  drawMarks();
}

function path(ring) {
  let drawn = "";
  for (let i = 0; i < ring.length; i += 2) drawn += `${i ? "L" : "M"}${ring[i]} ${ring[i + 1]}`;
  return `${drawn}Z`;
}

// --- the panel at the side ------------------------------------------------------------------

function drawTabs() {
  const names = { layers: "Layers", regions: "Regions", objects: "Objects" };
  at("tabs").replaceChildren(...["layers", ...slide.tables].map((tab) => {
    const button = make("button", { type: "button", textContent: names[tab] });
    button.dataset.tab = tab;
    button.addEventListener("click", () => showTab(tab));
    return button;
  }));
}

function showTab(tab) {
  state.tab = tab;
  for (const button of at("tabs").children) button.setAttribute("aria-pressed", button.dataset.tab === tab);
  at("tab-layers").hidden = tab !== "layers";
  at("tab-table").hidden = tab === "layers";
  if (tab !== "layers") {
    state.table = tab;
    state.page = 0;
    drawTableHead();
    told(fillTable());
  }
}

function checkbox(text, checked, changed, id) {
  const box = make("input", { type: "checkbox", checked });
  if (id) box.id = id;
  box.addEventListener("change", () => changed(box.checked));
  return make("label", {}, box, ...[text].flat());
}

function toggle(key, value = !state[key]) {
  state[key] = value;
  drawPanel();
  drawLayers();
}

function setClass(one, shown) {
  if (shown) state.hidden.delete(keyOf(one)); else state.hidden.add(keyOf(one));
  drawPanel();
  drawLayers();
}

function setOpacity(value) {
  state.opacity = Math.min(1, Math.max(0, Math.round(value * 20) / 20));
  const slider = at("opacity");
  if (slider) slider.value = state.opacity;
  drawLayers();
}

function classRow(one, number) {
  const text = [dot(one.colour), one.name, make("span", { className: "amount", textContent: area(one.area_mm2) })];
  const row = checkbox(text, !state.hidden.has(keyOf(one)), (shown) => setClass(one, shown), `class-${one.index}`);
  if (number < 10) row.title = `Key ${number}`;
  return row;
}

function drawPanel() {
  const parts = [];
  const head = (text) => parts.push(make("h3", { textContent: text }));
  if (slide.prediction) {
    head("Prediction");
    parts.push(checkbox("Shown", state.prediction, (on) => toggle("prediction", on), "show-prediction"));
  }
  if (slide.prediction || slide.truth) {
    const slider = make("input", { type: "range", id: "opacity", min: 0, max: 1, step: 0.05, value: state.opacity, title: "Opacity ([ and ])" });
    slider.setAttribute("aria-label", "Opacity");
    slider.addEventListener("input", () => setOpacity(Number(slider.value)));
    const choice = make("div", { className: "choice" }, ...["filled", "outlines"].map((style) => {
      const button = make("button", { type: "button", id: style, textContent: style });
      button.setAttribute("aria-pressed", state.style === style);
      button.addEventListener("click", () => toggle("style", style));
      return button;
    }));
    parts.push(slider, choice);
    head("Classes");
    parts.push(...slide.classes.map((one, i) => classRow(one, i + 1)));
    if (slide.unread_mm2 > 0 || (slide.prediction && slide.unread_mm2 === undefined)) {
      parts.push(classRow({ index: UNREAD, name: "unread", colour: null, area_mm2: slide.unread_mm2 }, 10));
    }
  }
  if (slide.truth) {
    head("Annotations");
    parts.push(checkbox("Shown", state.truth, (on) => toggle("truth", on), "show-truth"));
    if (slide.difference) {
      parts.push(checkbox("Swipe: predicted left, annotated right", state.swipe, (on) => toggle("swipe", on), "show-swipe"));
      parts.push(checkbox("Where they differ", state.difference, (on) => toggle("difference", on), "show-difference"));
      if (compared("difference")) {
        parts.push(...slide.differences.map((one) => make("label", {}, dot(one.colour), one.name)));
      }
    }
  }
  if (slide.probabilities.length) {
    head("Probability");
    const choices = ["none", ...slide.probabilities].map((name, i) => make("option", { value: i - 1, textContent: name, selected: i - 1 === state.probability }));
    const select = make("select", { id: "probability" }, ...choices);
    select.addEventListener("change", () => toggle("probability", Number(select.value)));
    parts.push(select);
  }
  head("Slide");
  const facts = [
    ["File", slide.slide || "not at hand"],
    ["Size", `${round(slide.width, 0)} × ${round(slide.height, 0)} px`],
    ["Extent", `${round(slide.width * slide.mpp[0] / 1000, 2)} × ${round(slide.height * slide.mpp[1] / 1000, 2)} mm`],
    ["Pixel", `${Number(slide.mpp[0].toPrecision(4))} µm`],
    ...(slide.tissue_mm2 === undefined ? [] : [["Tissue", area(slide.tissue_mm2)], ["Model", slide.model]]),
  ];
  parts.push(make("table", { className: "facts" }, ...facts.map(([name, value]) => make("tr", {}, make("td", { className: "soft", textContent: name }), make("td", { textContent: value })))));
  const { activeElement } = document;
  const focused = at("tab-layers").contains(activeElement) ? activeElement.id : "";
  at("tab-layers").replaceChildren(...parts);
  at(focused)?.focus(); // for who goes by the keyboard
}

// --- the tables of regions and objects ------------------------------------------------------

function drawTableHead() {
  const columns = [["class", "Class"], ["area", "Area µm²"], ["x", "x px"], ["y", "y px"]];
  at("table").tHead.replaceChildren(make("tr", {}, ...columns.map(([key, title]) => {
    const arrow = state.sort === key ? (state.order === "desc" ? " ↓" : " ↑") : "";
    const button = make("button", { type: "button", textContent: title + arrow });
    button.addEventListener("click", () => {
      state.order = state.sort === key && state.order === "desc" ? "asc" : "desc";
      state.sort = key;
      state.page = 0;
      drawTableHead();
      told(fillTable());
    });
    return make("th", {}, button);
  })));
  const all = make("option", { value: "", textContent: "all classes" });
  at("table-class").replaceChildren(all, ...slide.classes.map((one) => make("option", { value: one.name, textContent: one.name, selected: one.name === state.className })));
}

let filling = 0; // grows with each page that is asked for: answers to an earlier one are dropped

async function fillTable() {
  const turn = ++filling;
  const of = opening;
  const asked = new URLSearchParams({ sort: state.sort, order: state.order, page: state.page });
  if (state.className) asked.set("class", state.className);
  const found = await get(`${base()}/table/${state.table}?${asked}`);
  if (turn !== filling || of !== opening || at("tab-table").hidden) return;
  if (found.reading !== undefined) {
    at("table-count").textContent = `reading: ${round(found.reading, 0)}…`;
    at("table").tBodies[0].replaceChildren();
    setTimeout(() => { if (turn === filling && of === opening) told(fillTable()); }, 500);
    return;
  }
  at("table-count").textContent = round(found.total, 0);
  at("table").tBodies[0].replaceChildren(...found.rows.map((one) => {
    const known = slide.classes.find((each) => each.name === one.class);
    const row = make("tr", {},
      make("td", {}, make("button", { type: "button" }, dot(known ? known.colour : [128, 128, 128]), one.class)),
      make("td", { textContent: round(one.area_um2, 0) }),
      make("td", { textContent: round(one.x, 0) }),
      make("td", { textContent: round(one.y, 0) }));
    row.addEventListener("click", () => told(jump(one, row)));
    return row;
  }));
  const pages = Math.max(1, Math.ceil(found.total / found.rows_a_page));
  at("page-number").textContent = `${state.page + 1} of ${round(pages, 0)}`;
  at("page-back").disabled = state.page === 0;
  at("page-on").disabled = state.page + 1 >= pages;
}

async function jump(one, row) {
  const turn = opening;
  const found = await get(`${base()}/table/${state.table}/${one.id}`);
  if (turn !== opening) return;
  showSelected(found);
  row.classList.add("chosen");
  const xs = found.rings.flatMap((ring) => ring.filter((_, i) => i % 2 === 0));
  const ys = found.rings.flatMap((ring) => ring.filter((_, i) => i % 2 === 1));
  const extent = (values) => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
  const [[left, right], [top, bottom]] = [extent(xs), extent(ys)];
  const view = at("stage");
  const pixels = Math.max((right - left) / view.clientWidth, (bottom - top) / view.clientHeight);
  const times = Math.min(20, MICRONS_AT_1X / (3 * pixels * slide.mpp[0]));
  moveTo((left + right) / 2, (top + bottom) / 2, times);
}

// --- keys and buttons -----------------------------------------------------------------------

function onKey(event) {
  // Some keyboards have brackets behind AltGr (Ctrl and Alt to Windows) or Option.
  const isBracket = /^[[\]]$/.test(event.key) && event.altKey && !event.metaKey;
  const isModified = event.ctrlKey || event.metaKey || event.altKey;
  if (isModified && !isBracket || /^(INPUT|SELECT)$/.test(event.target.tagName) && event.target.type !== "checkbox" && event.target.type !== "range") return;
  const key = event.key;
  if (at("keys").open) return; // its own keys
  if (key === "?") at("keys").showModal();
  if (target === null) return;
  const isShown = slide?.id === target && !slide.failed; // not one before it, or none that can be
  const moves = { n: () => step(1), p: () => step(-1), g: () => showGallery(true) };
  const can = !isShown ? moves : {
    ...moves,
    h: () => slide.prediction && toggle("prediction"),
    o: () => toggle("style", state.style === "filled" ? "outlines" : "filled"),
    t: () => slide.truth && toggle("truth"),
    d: () => slide.difference && toggle("difference"),
    s: () => slide.difference && toggle("swipe"),
    c: () => told(copyLink()),
    "[": () => setOpacity(state.opacity - 0.1),
    "]": () => setOpacity(state.opacity + 0.1),
    0: () => osd.viewport.goHome(),
    "+": () => zoomBy(1.5),
    "=": () => zoomBy(1.5),
    "-": () => zoomBy(1 / 1.5),
    Escape: () => showSelected(null),
  };
  const one = isShown && /^[1-9]$/.test(key) && slide.classes[Number(key) - 1];
  if (one) setClass(one, state.hidden.has(keyOf(one)));
  else if (can[key]) can[key]();
  else return;
  event.preventDefault();
}

async function start() {
  at("to-gallery").addEventListener("click", () => showGallery(true));
  at("previous").addEventListener("click", () => step(-1));
  at("next").addEventListener("click", () => step(1));
  at("link").addEventListener("click", () => told(copyLink()));
  at("help").addEventListener("click", () => at("keys").showModal());
  at("filter").addEventListener("input", filterGallery);
  at("table-class").addEventListener("change", () => {
    state.className = at("table-class").value;
    state.page = 0;
    told(fillTable());
  });
  at("page-back").addEventListener("click", () => { state.page -= 1; told(fillTable()); });
  at("page-on").addEventListener("click", () => { state.page += 1; told(fillTable()); });
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", () => told(follow()));
  slides = await get("api/slides", null);
  drawGallery();
  await follow();
}

told(start());
