//! A snapshot of a job, and the colors in which it is drawn.

use gradwire_proto::pb::StatusResponse;
use gradwire_viewer::view::Shares;
use ratatui::style::{Color, Modifier, Style};

/// A snapshot of a job, and how to draw it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look<'a> {
    pub(super) status: &'a StatusResponse,
    /// The share of the time in which the others wait for each rank.
    pub(super) shares: &'a Shares,
    /// Whether colors are wanted.
    pub(super) colors: bool,
}

impl Look<'_> {
    pub(super) fn color(self, color: Color) -> Style {
        if self.colors { Style::new().fg(color) } else { Style::new() }
    }

    /// The style of a problem.
    pub(super) fn alarm(self) -> Style {
        self.color(Color::Red).add_modifier(Modifier::BOLD)
    }

    pub(super) fn heat(self, share: f64) -> Style {
        let color = match share {
            share if share >= 0.9 => Color::Red,
            share if share >= 0.5 => Color::Yellow,
            share if share > 0.0 => Color::Green,
            _ => return Style::new(),
        };
        self.color(color)
    }
}
