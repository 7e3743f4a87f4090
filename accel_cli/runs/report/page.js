// Draws each plot when it comes near the screen, with the colours of the page, and hides runs.
const plots = [...document.querySelectorAll(".plot")]
const dark = matchMedia("(prefers-color-scheme: dark)")
const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()
const hidden = new Set()
const options = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]] }

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
  const figure = JSON.parse(document.getElementById(plot.id.replace("plot", "data")).textContent)
  // A finger that drags over a plot scrolls the page.
  if (matchMedia("(pointer: coarse)").matches) figure.layout.dragmode = false
  await Plotly.newPlot(plot, figure.data, figure.layout, options)
  await Plotly.relayout(plot, theme())
  if (hidden.size) show(plot)
}

const near = new IntersectionObserver(entries => {
  for (const entry of entries) if (entry.isIntersecting) draw(entry.target)
}, { rootMargin: "600px" })
for (const plot of plots) near.observe(plot)
addEventListener("beforeprint", () => plots.forEach(draw))
dark.addEventListener("change", () => {
  for (const plot of plots) if (plot.drawn) Plotly.relayout(plot, theme())
})
for (const box of document.querySelectorAll(".runs input")) {
  box.addEventListener("change", () => {
    const run = Number(box.dataset.run)
    box.checked ? hidden.delete(run) : hidden.add(run)
    for (const plot of plots) if (plot.drawn) show(plot)
  })
}
