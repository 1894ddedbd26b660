//! Charts as SVG and PNG. A chart gives the same bytes on every machine, because the program
//! contains the font for PNG.

use std::sync::Once;

use gradwire_launcher::error::CommandError;
use gradwire_simulator::table::Chart;
use plotters::{
    coord::Shift,
    prelude::*,
    style::{FontStyle, register_font},
};

/// The size of a chart, in pixels.
const SIZE: (u32, u32) = (960, 600);

const FONT: &str = "sans-serif";

/// Lines with more points than this have no markers.
const MARKED: usize = 40;

/// The number of labels on an axis.
const LABELS: usize = 12;

/// Draws a chart as SVG.
pub(super) fn svg(chart: &Chart) -> Result<String, CommandError> {
    let mut text = String::new();
    draw(&SVGBackend::with_string(&mut text, SIZE).into_drawing_area(), chart)?;
    Ok(text)
}

/// Draws a chart as PNG.
pub(super) fn png(chart: &Chart) -> Result<Vec<u8>, CommandError> {
    let (width, height) = SIZE;
    let mut pixels = vec![0; (width * height * 3) as usize];
    draw(&BitMapBackend::with_buffer(&mut pixels, SIZE).into_drawing_area(), chart)?;
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_compression(png::Compression::High);
    let written = encoder.write_header().and_then(|mut writer| {
        writer.write_image_data(&pixels)?;
        writer.finish()
    });
    written.map_err(|error| failed(chart, &error))?;
    Ok(bytes)
}

fn failed(chart: &Chart, error: &dyn std::fmt::Display) -> CommandError {
    CommandError::failed(format!("the chart {} can't be drawn: {error}", chart.title))
}

/// Logarithmic axes use base 2, so that doublings are equally far apart.
fn place(value: f64, logarithmic: bool) -> f64 {
    if logarithmic { value.log2() } else { value }
}

/// The value at a position, with three digits.
fn label(place: f64, logarithmic: bool) -> String {
    let value = if logarithmic { place.exp2() } else { place };
    let digits = 2 - value.abs().max(1e-9).log10().floor() as i32;
    let text = format!("{value:.*}", digits.clamp(0, 9) as usize);
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

/// From the smallest to the largest value, never empty. A linear axis begins at 0.
fn range(values: impl Iterator<Item = f64>, logarithmic: bool) -> std::ops::Range<f64> {
    let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
    for value in values {
        (least, most) = (least.min(value), most.max(value));
    }
    if !logarithmic {
        least = least.min(0.0);
    }
    match most - least {
        width if !width.is_finite() => 0.0..1.0,
        width if width <= 0.0 => least - 0.5..most + 0.5,
        width => least..most + 0.02 * width,
    }
}

fn draw<B: DrawingBackend>(
    area: &DrawingArea<B, Shift>,
    chart: &Chart,
) -> Result<(), CommandError> {
    static LETTERS: Once = Once::new();
    LETTERS.call_once(|| {
        // Fails only for an invalid font.
        let _ = register_font(FONT, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT);
    });
    lines(area, chart).map_err(|error| failed(chart, &error))
}

fn lines<B: DrawingBackend>(
    area: &DrawingArea<B, Shift>,
    chart: &Chart,
) -> Result<(), DrawingAreaErrorKind<B::ErrorType>> {
    let [log_x, log_y] = chart.logarithmic;
    let at = |&(x, y): &(f64, f64)| {
        let point = (place(x, log_x), place(y, log_y));
        (point.0.is_finite() && point.1.is_finite()).then_some(point)
    };
    let lines: Vec<(&str, Vec<(f64, f64)>)> = chart
        .lines
        .iter()
        .map(|(name, points)| (&name[..], points.iter().filter_map(at).collect()))
        .collect();
    let all = || lines.iter().flat_map(|(_, points)| points);
    let (xs, ys) =
        (range(all().map(|point| point.0), log_x), range(all().map(|point| point.1), log_y));
    area.fill(&WHITE)?;
    let mut drawn = ChartBuilder::on(area)
        .caption(&chart.title, (FONT, 24))
        .margin(16)
        .x_label_area_size(56)
        .y_label_area_size(80)
        .build_cartesian_2d(xs, ys)?;
    drawn
        .configure_mesh()
        .x_desc(&chart.x)
        .y_desc(&chart.y)
        .x_labels(LABELS)
        .y_labels(LABELS)
        .x_label_formatter(&|&x| label(x, log_x))
        .y_label_formatter(&|&y| label(y, log_y))
        .label_style((FONT, 15))
        .axis_desc_style((FONT, 17))
        .light_line_style(TRANSPARENT)
        .draw()?;
    for (number, (name, points)) in lines.iter().enumerate() {
        let colour = Palette99::pick(number).to_rgba();
        let marked = points.len() <= MARKED;
        let line = LineSeries::new(points.iter().copied(), colour.stroke_width(2));
        drawn
            .draw_series(line.point_size(if marked { 3 } else { 0 }))?
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(2)));
    }
    if lines.len() > 1 {
        drawn
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .label_font((FONT, 15))
            .draw()?;
    }
    area.present()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(lines: Vec<(String, Vec<(f64, f64)>)>, logarithmic: bool) -> Chart {
        let [title, x, y] = ["steps", "nodes", "seconds < 2 & more"].map(str::to_owned);
        Chart { title, x, y, logarithmic: [logarithmic; 2], lines }
    }

    fn pixels(png: &[u8]) -> (u32, u32, Vec<u8>) {
        let mut reader = png::Decoder::new(std::io::Cursor::new(png)).read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        (info.width, info.height, pixels)
    }

    #[test]
    fn both_pictures_show_all_lines() {
        for logarithmic in [false, true] {
            let line = |factor: f64| -> Vec<(f64, f64)> {
                (0..9).map(|k| (f64::from(8 << k), factor * f64::from(k + 1))).collect()
            };
            let two = vec![("ring".to_owned(), line(1.0)), ("<b>".to_owned(), line(3.0))];
            let two = chart(two, logarithmic);
            let (picture, image) = (svg(&two).unwrap(), png(&two).unwrap());
            for text in ["steps", "nodes", "seconds &lt; 2 &amp; more", "ring", "&lt;b&gt;"] {
                assert!(picture.contains(text), "{text} is missing: {picture}");
            }
            let (width, height, pixels) = pixels(&image);
            assert_eq!((width, height), SIZE);
            for number in 0..2 {
                let (r, g, b) = Palette99::pick(number).to_rgba().rgb();
                let stroke = format!("stroke=\"#{r:02X}{g:02X}{b:02X}\"");
                assert!(picture.contains(&stroke), "{stroke} is missing: {picture}");
                let has = pixels.chunks(3).filter(|pixel| *pixel == [r, g, b]).count();
                assert!(has > 500, "line {number}: {has} pixels");
            }
            // Letters are drawn, too.
            assert!(pixels.chunks(3).filter(|pixel| *pixel == [0; 3]).count() > 500);
            assert_eq!((picture, image), (svg(&two).unwrap(), png(&two).unwrap()));
        }
    }

    #[test]
    fn values_without_a_position_are_left_out() {
        let none = chart(vec![], false);
        let one = chart(vec![("a".into(), vec![(1.0, 2.0)])], false);
        let odd = vec![(0.0, 1.0), (f64::NAN, 1.0), (2.0, f64::INFINITY), (4.0, 5.0)];
        let odd = chart(vec![("a".into(), odd)], true);
        for chart in [none, one, odd] {
            assert!(svg(&chart).unwrap().ends_with("</svg>\n"));
            assert!(!png(&chart).unwrap().is_empty());
        }
    }

    /// BOUND: pictures in documents have at most 200 KB.
    #[test]
    fn pictures_are_small() {
        let line = |n: u32| (0..256).map(move |k| (f64::from(k), f64::from(k * n % 977))).collect();
        let all = (0..12).map(|n| (format!("circulant(radix={n})"), line(n + 1))).collect();
        let all = chart(all, false);
        let (vectors, image) = (svg(&all).unwrap().len(), png(&all).unwrap().len());
        assert!(vectors <= 200_000 && image <= 200_000, "{vectors} {image}");
    }

    #[test]
    fn labels_have_three_digits() {
        for (place, text) in [(0.0, "0"), (12.5, "12.5"), (1234.0, "1234"), (0.00015, "0.00015")] {
            assert_eq!(label(place, false), text);
        }
        for (place, text) in [(3.0, "8"), (11.0, "2048"), (-2.0, "0.25")] {
            assert_eq!(label(place, true), text);
        }
    }
}
