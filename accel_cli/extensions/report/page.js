// Draws each plot when it comes near the screen, with the colours of the page, and hides runs.
const plots = [...document.querySelectorAll(".plot")]
const dark = matchMedia("(prefers-color-scheme: dark)")
const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()
const hidden = new Set()
const ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%'()*+-;,=>?@^_\"{|}~"
const DIGITS = new Uint8Array(128)
for (let i = 0; i < 85; i++) DIGITS[ALPHABET.charCodeAt(i)] = i
const logarithmic = document.getElementById("log")
const smoothing = document.getElementById("smoothing")
const options = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]] }

// Returns the text of an element that `pack` of page.py has written.
async function unpack(id) {
  const text = document.getElementById(id).textContent.trim()
  const padding = (5 - text.length % 5) % 5
  const bytes = new Uint8Array((text.length + padding) / 5 * 4)
  for (let i = 0, out = 0; i < text.length; i += 5, out += 4) {
    let value = 0
    for (let j = 0; j < 5; j++) value = value * 85 + (i + j < text.length ? DIGITS[text.charCodeAt(i + j)] : 84)
    bytes[out] = value >>> 24
    bytes[out + 1] = value >>> 16
    bytes[out + 2] = value >>> 8
    bytes[out + 3] = value
  }
  const data = new Blob([bytes.subarray(0, bytes.length - padding)])
  return new Response(data.stream().pipeThrough(new DecompressionStream("gzip"))).text()
}

// The library is a script whose digest the policy of the page allows.
const library = unpack("plotly").then(text => {
  const script = document.createElement("script")
  script.textContent = text
  document.head.append(script)
})

const figures = unpack("figures").then(JSON.parse)

// Returns the exponential mean of values, as far as it is known at each of them.
function smooth(values, weight) {
  let mean = 0, scale = 0
  return values.map(value => {
    if (value === null) return null
    mean = weight * mean + (1 - weight) * value
    scale = weight * scale + 1 - weight
    return Number((mean / scale).toPrecision(7))
  })
}

const isMetric = plot => plot.closest("#metrics") !== null

// Changes the curves of a metric as the controls above them say.
function adjust(plot) {
  const type = logarithmic.checked ? "log" : "linear", weight = Number(smoothing.value)
  if (plot.axisType === type && plot.weight === weight) return
  const lines = plot.values.map((values, index) => [values, index]).filter(([values]) => values)
  const y = lines.map(([values]) => weight ? smooth(values, weight) : values)
  // A constant has a range of its own, in which it is not taken for 0.
  const range = type === "linear" && plot.range ? { "yaxis.range": plot.range } : { "yaxis.autorange": true }
  Plotly.update(plot, { y }, { "yaxis.type": type, ...range }, lines.map(([, index]) => index))
  plot.axisType = type
  plot.weight = weight
}

function theme() {
  const axis = { color: color("--dim"), gridcolor: color("--line"), zerolinecolor: color("--line") }
  const changes = {
    "font.color": color("--text"), "hoverlabel.bgcolor": color("--paper"), "hoverlabel.bordercolor": color("--line"),
    "hoverlabel.font.color": color("--text"), "modebar.color": color("--dim"), "modebar.activecolor": color("--text"),
    "modebar.bgcolor": "rgba(0,0,0,0)",
  }
  for (const name of ["xaxis", "yaxis"]) for (const key in axis) changes[`${name}.${key}`] = axis[key]
  return changes
}

function show(plot) {
  const visible = plot.data.map(trace => !hidden.has(trace.meta))
  Plotly.restyle(plot, { visible })
}

async function draw(plot) {
  if (plot.drawn) return
  plot.drawn = true
  await library
  const figure = (await figures)[Number(plot.id.replace("plot-", ""))]
  plot.values = figure.data.map(trace => trace.yaxis === "y2" ? null : trace.y)
  plot.range = figure.layout.yaxis.range
  plot.axisType = "linear"
  plot.weight = 0
  // A finger that drags over a plot scrolls the page.
  if (matchMedia("(pointer: coarse)").matches) figure.layout.dragmode = false
  await Plotly.newPlot(plot, figure.data, figure.layout, options)
  await Plotly.relayout(plot, theme())
  if (isMetric(plot)) adjust(plot)
  if (hidden.size) show(plot)
  plot.ready = true
}

for (const control of [logarithmic, smoothing]) {
  control?.addEventListener("input", () => plots.filter(plot => plot.ready && isMetric(plot)).forEach(adjust))
}

const near = new IntersectionObserver(entries => {
  for (const entry of entries) if (entry.isIntersecting) draw(entry.target)
}, { rootMargin: "600px" })
for (const plot of plots) near.observe(plot)
addEventListener("beforeprint", () => plots.forEach(draw))
dark.addEventListener("change", () => {
  for (const plot of plots) if (plot.ready) Plotly.relayout(plot, theme())
})
for (const box of document.querySelectorAll(".runs input")) {
  box.addEventListener("change", () => {
    const run = Number(box.dataset.run)
    box.checked ? hidden.delete(run) : hidden.add(run)
    for (const plot of plots) if (plot.ready) show(plot)
  })
}
