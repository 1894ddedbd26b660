//! The faults of an input.

use std::ops::Range;

use toml::Spanned;

use super::file::{
    ANY, FaultPart, File, InputError, MILLI, OptionalNumber, POSITIVE, Reader, Text,
};
use crate::{
    fault::{Effect, Fault, Target},
    network::Network,
};

pub(super) fn faults(
    reader: &Reader<'_>,
    file: &File,
    network: &Network,
    labels: &[String],
) -> Result<Vec<Fault>, InputError> {
    file.faults.iter().map(|part| fault(reader, part, network, labels)).collect()
}

/// The keys of each kind of fault.
const KINDS: [(&str, &[&str]); 5] = [
    ("pause", &["hosts", "every_ms"]),
    ("slow", &["host", "rack", "link", "factor"]),
    ("busy", &["host", "times"]),
    ("loss", &["loss_percent"]),
    ("leave", &["host"]),
];

fn fault(
    reader: &Reader<'_>,
    part: &Spanned<FaultPart>,
    network: &Network,
    labels: &[String],
) -> Result<Fault, InputError> {
    let (span, part) = (part.span(), part.get_ref());
    let kind = part.kind.get_ref().as_str();
    let Some((_, keys)) = KINDS.iter().find(|(name, _)| *name == kind) else {
        let what = format!("fault.kind is {kind:?}: it must be pause, slow, busy, loss or leave");
        return Err(reader.error(part.kind.span(), what));
    };
    let text = |text: &Text| text.as_ref().map(Spanned::span);
    let number = |number: &OptionalNumber| number.as_ref().map(Spanned::span);
    for (key, given) in [
        ("host", text(&part.host)),
        ("rack", text(&part.rack)),
        ("link", number(&part.link)),
        ("hosts", number(&part.hosts)),
        ("every_ms", number(&part.every_ms)),
        ("factor", number(&part.factor)),
        ("times", number(&part.times)),
        ("loss_percent", number(&part.loss_percent)),
    ] {
        if let Some(span) = given.filter(|_| !keys.contains(&key)) {
            let what = format!("fault.{key}: a {kind:?} fault has only {}", keys.join(", "));
            return Err(reader.error(span, what));
        }
    }
    let host = || -> Result<u32, InputError> {
        let names: Vec<&str> = network.hosts.iter().map(|host| host.name.as_str()).collect();
        let Some(name) = &part.host else {
            return Err(reader.error(span.clone(), format!("a {kind:?} fault needs host")));
        };
        let place = names.iter().position(|one| one == name.get_ref());
        place.map(|place| place as u32).ok_or_else(|| {
            let what = format!("fault.host: unknown host {:?}", name.get_ref());
            reader.error(name.span(), what)
        })
    };
    let all = network.hosts.len() as f64;
    let effect = match kind {
        "pause" => Effect::Pause {
            hosts: reader.whole(&part.hosts, "fault.hosts", (1.0, all), 1.0)? as u32,
            every: reader.number(&part.every_ms, "fault.every_ms", POSITIVE, 20.0)? * MILLI,
        },
        "slow" => {
            let factor = reader.number(&part.factor, "fault.factor", (0.0, 1.0), 0.0)?;
            Effect::Slow {
                target: target(reader, part, span.clone(), network, labels, host)?,
                factor,
            }
        }
        "busy" => Effect::Busy {
            host: host()?,
            times: reader.number(&part.times, "fault.times", (1.0, 1e6), 10.0)?,
        },
        "loss" => {
            let percent = (0.0, 99.0);
            let loss = reader.number(&part.loss_percent, "fault.loss_percent", percent, 0.1)?;
            Effect::Loss { rate: loss / 100.0 }
        }
        _ => Effect::Leave { host: host()? },
    };
    let from = reader.number(&part.from_ms, "fault.from_ms", ANY, 0.0)? * MILLI;
    let until = reader.number(&part.until_ms, "fault.until_ms", ANY, f64::INFINITY)? * MILLI;
    if let Some(given) = part.until_ms.as_ref().filter(|_| until <= from) {
        let what = "fault.until_ms must be more than fault.from_ms".to_owned();
        return Err(reader.error(given.span(), what));
    }
    Ok(Fault { effect, from, until })
}

fn target(
    reader: &Reader<'_>,
    part: &FaultPart,
    span: Range<usize>,
    network: &Network,
    labels: &[String],
    host: impl Fn() -> Result<u32, InputError>,
) -> Result<Target, InputError> {
    let Some(rack) = &part.rack else {
        if let Some(link) = &part.link {
            let what = "fault.link needs the key rack".to_owned();
            return Err(reader.error(link.span(), what));
        }
        return Ok(Target::Host(host()?));
    };
    if part.host.is_some() {
        return Err(reader.error(span, "a fault has either host or rack, not both".to_owned()));
    }
    let wrong = |what: String| reader.error(rack.span(), what);
    if network.tiers.is_empty() {
        return Err(wrong("fault.rack: the cluster has no links between racks".to_owned()));
    }
    let member = labels.iter().position(|label| label == rack.get_ref());
    let member = member
        .ok_or_else(|| wrong(format!("fault.rack: no host is in rack {:?}", rack.get_ref())))?;
    let groups = network.topology.groups(1);
    let group = groups.iter().position(|group| group.contains(&(member as u32)));
    let most = f64::from(network.tiers[0].links) - 1.0;
    let link = reader.whole(&part.link, "fault.link", (0.0, most), 0.0)? as u32;
    let link = part.link.as_ref().map(|_| link);
    Ok(Target::Uplink { tier: 1, group: group.unwrap_or_default() as u32, link })
}
