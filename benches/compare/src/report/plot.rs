//! The drawings of the report.

use std::{f64::consts::TAU, io, ops::Range};

use plotters::{
    coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged},
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use crate::{peers::OURS, results::Results};

use super::{
    shown,
    spec::{Form, Line, Panel, Section, Shown, Unit},
};

const SIZE: (u32, u32) = (1_000, 470);
/// For the title and the legend.
const HEAD: i32 = 78;
const FONT: &str = "sans-serif";

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Drawn<T> = Result<T, Box<dyn std::error::Error>>;

/// How a peer looks: the colours of Okabe and Ito, which the colour-blind tell apart, and a shape of
/// its own for those who see none (corners, and by what part of a circle they are turned).
struct Look {
    colour: RGBColor,
    corners: usize,
    turn: f64,
}

fn look(peer: &str) -> Look {
    let (colour, corners, turn) = match peer {
        OURS => ((213, 94, 0), 24, 0.0),
        "dashmap" => ((0, 114, 178), 4, 0.125),
        "64 x Mutex" => ((0, 0, 0), 3, 0.75),
        "papaya" => ((0, 158, 115), 4, 0.0),
        "quick_cache" => ((86, 180, 233), 3, 0.25),
        "scc" => ((204, 121, 167), 5, 0.75),
        _ => ((120, 120, 120), 6, 0.0),
    };
    Look { colour: RGBColor(colour.0, colour.1, colour.2), corners, turn }
}

impl Look {
    fn marker(&self, radius: f64) -> Vec<(i32, i32)> {
        let corner = |corner: usize| {
            let angle = (corner as f64 / self.corners as f64 + self.turn) * TAU;
            ((angle.cos() * radius).round() as i32, (angle.sin() * radius).round() as i32)
        };
        (0..self.corners).map(corner).collect()
    }
}

fn width(peer: &str) -> u32 {
    if peer == OURS { 4 } else { 2 }
}

fn radius(peer: &str) -> f64 {
    if peer == OURS { 6.0 } else { 5.0 }
}

pub(super) fn svg(section: &Section, results: &Results) -> io::Result<String> {
    let mut svg = String::new();
    draw(section, results, &mut svg).map_err(|error| io::Error::other(error.to_string()))?;
    Ok(svg)
}

fn draw(section: &Section, results: &Results, svg: &mut String) -> Drawn<()> {
    let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let title = TextStyle::from((FONT, 22).into_font()).color(&BLACK);
    root.draw(&Text::new(section.title, (16, 10), title))?;
    let panels = || section.panels.iter().filter(|panel| panel.is_measured(results));
    legend(&root, |peer| panels().any(|panel| panel.has(results, peer)))?;
    let (_, lower) = root.split_vertically(HEAD);
    let scale = |panel| -> Range<f64> {
        let others = panels().filter(|_| section.one_scale).map(|other| extent(other, results));
        others.fold(extent(panel, results), |all, other| {
            all.start.min(other.start)..all.end.max(other.end)
        })
    };
    for (area, panel) in lower.split_evenly((1, panels().count())).iter().zip(panels()) {
        match panel.form {
            Form::Bars => bars(area, panel, results, Axis::linear(scale(panel).end))?,
            Form::Linear => lines(area, panel, results, Axis::linear(scale(panel).end))?,
            Form::Log => lines(area, panel, results, Axis::log(&scale(panel)))?,
        }
    }
    root.present()?;
    Ok(())
}

/// A row that names what is drawn.
fn legend(root: &Area<'_>, is_drawn: impl Fn(&str) -> bool) -> Drawn<()> {
    let style = TextStyle::from((FONT, 15).into_font()).color(&BLACK);
    let style = style.pos(Pos::new(HPos::Left, VPos::Center));
    let mut x = 22;
    for peer in shown().filter(|peer| is_drawn(peer)) {
        let look = look(peer);
        let stroke = look.colour.stroke_width(width(peer));
        root.draw(&PathElement::new([(x, 58), (x + 30, 58)], stroke))?;
        let marker = Polygon::new(look.marker(radius(peer)), look.colour.filled());
        root.draw(&(EmptyElement::at((x + 15, 58)) + marker))?;
        root.draw(&Text::new(peer, (x + 38, 58), style.clone()))?;
        x += 62 + peer.len() as i32 * 9;
    }
    Ok(())
}

/// One point of a line: where along the axis, and what.
type Point = (f64, Shown);

fn points(line: &Line, unit: Unit, results: &Results, peer: &str, aside: f64) -> Vec<Point> {
    let point = |(at, place): (usize, &super::spec::Place)| {
        Some((at as f64 + aside, unit.shown(place.of(results, peer)?)))
    };
    line.places.iter().enumerate().filter_map(point).collect()
}

/// What there is to see in a panel, so that its axis can be made.
fn extent(panel: &Panel, results: &Results) -> Range<f64> {
    let all = shown().flat_map(|peer| {
        let line = move |line| points(line, panel.unit, results, peer, 0.0);
        panel.lines.iter().flat_map(line)
    });
    all.fold(f64::INFINITY..0.0, |range, (_, shown)| {
        range.start.min(shown.low)..range.end.max(shown.high)
    })
}

/// An axis whose marks are known.
struct Axis {
    range: Range<f64>,
    is_log: bool,
    /// With a label.
    marks: Vec<f64>,
    /// Without one.
    light: Vec<f64>,
}

impl Axis {
    /// For places with a name: 0, 1 and so on, with as much room at both ends.
    fn of_places(places: usize, room: f64) -> Self {
        let marks: Vec<f64> = (0..places).map(|place| place as f64).collect();
        let range = -room..places as f64 - 1.0 + room;
        Self { range, is_log: false, marks, light: Vec::new() }
    }

    fn linear(highest: f64) -> Self {
        let (top, step) = linear_top(highest);
        let marks = (0..).map(|n| f64::from(n) * step).take_while(|y| *y <= top * 1.001);
        Self { range: 0.0..top, is_log: false, marks: marks.collect(), light: Vec::new() }
    }

    fn log(extent: &Range<f64>) -> Self {
        let steps = round_steps(extent);
        let (bottom, top) = (steps[0], steps[steps.len() - 1]);
        let is_power = |step: &f64| (step.log10() - step.log10().round()).abs() < 1e-9;
        let is_labelled = |step: &f64| top / bottom <= 200.0 || is_power(step);
        let marks = steps.iter().copied().filter(is_labelled).collect();
        Self { range: bottom..top, is_log: true, marks, light: steps }
    }
}

impl Ranged for Axis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let scaled = |value: f64| if self.is_log { value.ln() } else { value };
        let (start, end) = (scaled(self.range.start), scaled(self.range.end));
        let part = (scaled(*value) - start) / (end - start);
        limit.0 + (part * f64::from(limit.1 - limit.0)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        if hint.weight().allow_light_points() { self.light.clone() } else { self.marks.clone() }
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

/// 1, 2 and 5 times the powers of ten, from below `range` to above it.
fn round_steps(range: &Range<f64>) -> Vec<f64> {
    let first = range.start.max(1.0).log10().floor() as i32;
    let last = range.end.max(1.0).log10().ceil() as i32;
    let steps: Vec<f64> = (first..=last)
        .flat_map(|power| [1.0, 2.0, 5.0].map(|step| step * 10_f64.powi(power)))
        .collect();
    let begin = steps.iter().rposition(|step| *step <= range.start).unwrap_or(0);
    let end = steps.iter().position(|step| *step >= range.end).unwrap_or(steps.len() - 1);
    steps[begin..=end.max(begin + 1).min(steps.len() - 1)].to_vec()
}

/// A round number above `highest`, and the distance of the marks below it.
fn linear_top(highest: f64) -> (f64, f64) {
    let power = 10_f64.powf(highest.log10().floor());
    let step = [0.1, 0.2, 0.5, 1.0, 2.0].map(|step| step * power);
    let step = step.into_iter().find(|step| highest / step <= 8.0).unwrap_or(power);
    // Thousandths are lost in the sums of tenths.
    let top = (highest * 1.02 / step).ceil() * step;
    (top, step)
}

fn lines(area: &Area<'_>, panel: &Panel, results: &Results, up: Axis) -> Drawn<()> {
    let places: Vec<&str> =
        panel.lines.first().map_or(&[][..], |line| line.places).iter().map(|p| p.name).collect();
    let small = (FONT, if places.len() > 4 { 12 } else { 14 });
    let mut chart = ChartBuilder::on(area)
        .caption(panel.title, (FONT, 16))
        .margin(10)
        .margin_right(18)
        .x_label_area_size(46)
        .y_label_area_size(66)
        .build_cartesian_2d(Axis::of_places(places.len(), 0.3), up)?;
    let place = |x: &f64| places.get(x.round() as usize).map_or_else(String::new, |x| (*x).into());
    let label = |y: &f64| panel.unit.label((y * 1e6).round() / 1e6);
    chart
        .configure_mesh()
        .x_label_formatter(&place)
        .y_label_formatter(&label)
        .x_desc(panel.across)
        .y_desc(panel.unit.name())
        .bold_line_style(RGBColor(205, 205, 205))
        .light_line_style(RGBColor(235, 235, 235))
        .x_label_style(small)
        .y_label_style((FONT, 13))
        .axis_desc_style((FONT, 14))
        .draw()?;
    let peers: Vec<&str> = shown().filter(|peer| panel.has(results, peer)).collect();
    // Ours last: on top.
    for (number, peer) in peers.iter().enumerate().rev() {
        let look = look(peer);
        // Beside each other, so that the ranges do not cover each other.
        let aside = (number as f64 - peers.len() as f64 / 2.0) * 0.02;
        for (second, line) in panel.lines.iter().enumerate() {
            let points = points(line, panel.unit, results, peer, aside);
            for (x, shown) in &points {
                let thin = look.colour.mix(0.5).stroke_width(1);
                let range = PathElement::new([(*x, shown.low), (*x, shown.high)], thin);
                chart.draw_series([range])?;
            }
            let medians = points.iter().map(|(x, shown)| (*x, shown.median));
            let stroke = look.colour.stroke_width(width(peer));
            // With two lines for each peer the first is what is usual, and dashed.
            if second + 1 < panel.lines.len() {
                chart.draw_series(DashedLineSeries::new(medians.clone(), 6, 5, stroke))?;
            } else {
                chart
                    .draw_series([PathElement::new(medians.clone().collect::<Vec<_>>(), stroke)])?;
            }
            for at in medians {
                let marker = Polygon::new(look.marker(radius(peer)), look.colour.filled());
                chart.plotting_area().draw(&(EmptyElement::at(at) + marker))?;
            }
        }
    }
    if let [usual, other] = panel.lines {
        let style = TextStyle::from((FONT, 13).into_font()).color(&BLACK);
        let (left, top) = chart.plotting_area().get_base_pixel();
        let words = format!("dashed: {}; solid: {}", usual.name, other.name);
        let (x, y) = area.get_base_pixel();
        area.draw(&Text::new(words, (left - x + 10, top - y + 8), style))?;
    }
    Ok(())
}

fn bars(area: &Area<'_>, panel: &Panel, results: &Results, up: Axis) -> Drawn<()> {
    let Some(line) = panel.lines.first() else { return Ok(()) };
    let is_measured =
        |place: &&super::spec::Place| shown().any(|peer| place.of(results, peer).is_some());
    let places: Vec<_> = line.places.iter().filter(is_measured).collect();
    let peers: Vec<&str> = shown().filter(|peer| panel.has(results, peer)).collect();
    let mut chart = ChartBuilder::on(area)
        .caption(panel.title, (FONT, 16))
        .margin(10)
        .margin_right(18)
        .x_label_area_size(30)
        .y_label_area_size(66)
        .build_cartesian_2d(Axis::of_places(peers.len(), 0.5), up)?;
    let peer = |x: &f64| peers.get(x.round() as usize).map_or_else(String::new, |x| (*x).into());
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_label_formatter(&peer)
        .y_label_formatter(&|y| panel.unit.label(*y))
        .y_desc(panel.unit.name())
        .bold_line_style(RGBColor(205, 205, 205))
        .x_label_style((FONT, 14))
        .y_label_style((FONT, 13))
        .axis_desc_style((FONT, 14))
        .draw()?;
    let wide = 0.8 / places.len() as f64;
    let centred = TextStyle::from((FONT, 13).into_font()).color(&BLACK);
    let centred = centred.pos(Pos::new(HPos::Center, VPos::Bottom));
    for (at, peer) in peers.iter().enumerate() {
        for (number, place) in places.iter().enumerate() {
            let Some(row) = place.of(results, peer) else { continue };
            let height = panel.unit.shown(row).median;
            let left = at as f64 - 0.4 + number as f64 * wide;
            let strength = (number + 1) as f64 / places.len() as f64;
            let colour = look(peer).colour.mix(0.25 + 0.75 * strength);
            let ends = [(left + 0.02, 0.0), (left + wide - 0.02, height)];
            chart.draw_series([Rectangle::new(ends, colour.filled())])?;
            let text = EmptyElement::at((left + wide / 2.0, height))
                + Text::new(panel.unit.text(height), (0, -3), centred.clone());
            chart.plotting_area().draw(&text)?;
        }
    }
    let words: Vec<&str> = places.iter().map(|place| place.name).collect();
    let words = match words[..] {
        [only] => only.into(),
        _ => format!("from light to dark: {}", words.join(", ")),
    };
    let style = TextStyle::from((FONT, 13).into_font()).color(&BLACK);
    area.draw(&Text::new(words, (90, 42), style))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_hold_what_is_drawn_and_end_at_round_numbers() {
        assert_eq!(round_steps(&(150.0..3_000.0)), [100.0, 200.0, 500.0, 1e3, 2e3, 5e3]);
        assert_eq!(round_steps(&(100.0..100.0)), [100.0, 200.0]);
        assert_eq!(round_steps(&(16.0..16.0)), [10.0, 20.0]);
        for highest in [0.13, 0.99, 1.0, 2.4, 7.9, 83.0, 183.0, 999.0] {
            let (top, step) = linear_top(highest);
            let marks = top / step;
            assert!(top >= highest && top < highest * 1.5, "{highest}: {top}");
            assert!((2.0..=9.5).contains(&marks), "{highest}: {marks} marks");
        }
    }

    #[test]
    fn no_two_peers_look_the_same() {
        let looks: Vec<_> = shown().map(look).collect();
        for (number, one) in looks.iter().enumerate() {
            for other in &looks[number + 1..] {
                assert!(one.colour != other.colour);
                assert!((one.corners, one.turn) != (other.corners, other.turn));
            }
        }
    }
}
