//! Draws the stages of each kind and size of request as bars, in SVG.
//!
//! The only input from outside is numbers, so nothing needs escaping.

use std::io::{self, Write};

use control::size::readable;
use stats::Stage;

use super::group::Group;

/// Colours that colour-blind people can tell apart (Okabe and Ito).
const COLOURS: [&str; 7] = ["#E69F00", "#56B4E9", "#999999", "#F0E442", "#0072B2", "#009E73", "#CC79A7"];

const WIDTH: f64 = 900.0;
const LEFT: f64 = 170.0;
const ROW: f64 = 28.0;
const TOP: f64 = 60.0;

/// Writes the drawing of the groups.
pub fn write(out: &mut dyn Write, groups: &[Group]) -> io::Result<()> {
    let longest = groups.iter().map(Group::typical).fold(1.0, f64::max);
    let rows = u32::try_from(groups.len()).unwrap_or(u32::MAX);
    let height = TOP + ROW * f64::from(rows) + 20.0;
    let scale = (WIDTH - LEFT - 90.0) / longest;
    writeln!(
        out,
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">"#
    )?;
    writeln!(out, r#"<rect width="100%" height="100%" fill="white"/>"#)?;
    writeln!(out, r#"<text x="10" y="20" font-size="14">Where the microseconds of a request go</text>"#)?;
    let mut x = 10.0;
    for (stage, colour) in Stage::ALL.iter().zip(COLOURS) {
        writeln!(out, r#"<rect x="{x}" y="32" width="12" height="12" fill="{colour}"/>"#)?;
        writeln!(out, r#"<text x="{}" y="42">{}</text>"#, x + 16.0, stage.name())?;
        x += 100.0;
    }
    let mut y = TOP;
    for group in groups {
        let name = format!("{} {} ({})", group.kind.name(), readable(group.len), group.count);
        writeln!(out, r#"<text x="10" y="{}">{name}</text>"#, y + 16.0)?;
        let mut x = LEFT;
        for ((stage, ns), colour) in Stage::ALL.iter().zip(group.stages).zip(COLOURS) {
            let width = ns * scale;
            let title = format!("<title>{}: {:.1} µs</title>", stage.name(), ns / 1000.0);
            writeln!(out, r#"<rect x="{x:.2}" y="{y}" width="{width:.2}" height="20" fill="{colour}">{title}</rect>"#)?;
            x += width;
        }
        writeln!(out, r#"<text x="{:.2}" y="{}">{:.1} µs</text>"#, x + 6.0, y + 15.0, group.typical() / 1000.0)?;
        y += ROW;
    }
    writeln!(out, "</svg>")
}

#[cfg(test)]
mod test {
    use stats::Kind;

    use super::super::group::test::record;
    use super::*;

    #[test]
    fn the_bars_of_a_group_are_as_long_as_its_stages_together() {
        let records: Vec<_> = (0..10).map(|number| record(number, Kind::Read, 4096, 10_000)).collect();
        let mut out = Vec::new();
        write(&mut out, &Group::of(records.iter())).unwrap();
        let text = String::from_utf8(out).unwrap();
        let width =
            |line: &str| line.split("width=\"").nth(1).unwrap().split('"').next().unwrap().parse::<f64>().unwrap();
        let bars: Vec<f64> = text.lines().filter(|line| line.contains("<title>")).map(width).collect();
        assert_eq!(bars.len(), 7);
        assert!((bars.iter().sum::<f64>() - (WIDTH - LEFT - 90.0)).abs() < 0.1, "{bars:?}");
        assert!(text.contains("read 4 KiB (10)") && text.contains("storage: 10.0 µs") && text.ends_with("</svg>\n"));
        let mut none = Vec::new();
        write(&mut none, &[]).unwrap();
        assert!(String::from_utf8(none).unwrap().ends_with("</svg>\n"));
    }
}
