//! `--write-hostfile`: the hosts of the check as a hostfile, with the interface of each that all
//! others reach.

use std::{
    fs::OpenOptions,
    io::{self, Write},
    path::Path,
};

use gradwire_doctor::{choice, facts::Facts};
use gradwire_launcher::{error::CommandError, launch::plan::Node};
use gradwire_proto::VERSION;

/// The text of the hostfile.
///
/// # Errors
/// [`CommandError`] if a host is not reached by all others.
pub fn write(nodes: &[Node], facts: &Facts) -> Result<String, CommandError> {
    let chosen = choice::interfaces(facts).map_err(|unreached| {
        let name = |host: &usize| facts.hosts[*host].name.as_str();
        let each = unreached.iter().take(3).map(|one| {
            let from: Vec<_> = one.from.iter().take(3).map(name).collect();
            let more = if one.from.len() > 3 { ", …" } else { "" };
            format!("{} from {}{more}", name(&one.host), from.join(", "))
        });
        let each: Vec<_> = each.collect();
        let more = if unreached.len() > 3 { "; …" } else { "" };
        let what = format!("no interface reaches every host: {}{more}", each.join("; "));
        CommandError::failed(what).hint("connect these hosts, or leave one of them out")
    })?;
    let mut text = format!("# Written by gradwire {VERSION} doctor.\n");
    for (node, offer) in nodes.iter().zip(chosen) {
        let Node { host, rack, line_mbit, .. } = node;
        let is_v6 = host.contains(':');
        text.push_str(&if is_v6 { format!("[{host}]") } else { host.clone() });
        text.push_str(&match node.ranks() {
            0 => " role=server".to_owned(),
            ranks => format!(" slots={ranks}"),
        });
        if !rack.is_empty() {
            text.push_str(&format!(" rack={rack}"));
        }
        if let Some(rate) = line_mbit {
            text.push_str(&format!(" line={rate}"));
        }
        if let Some(offer) = offer {
            text.push_str(&format!(" interface={}  # {}", offer.interface, offer.address.ip()));
        }
        text.push('\n');
    }
    Ok(text)
}

/// Makes sure, before the hosts are asked, that the file can be made and that none is replaced: it
/// may be the user's work.
///
/// # Errors
/// [`CommandError`] if the file exists, or its folder does not.
pub fn check(path: &Path) -> Result<(), CommandError> {
    if path.symlink_metadata().is_ok() {
        return Err(failed(path, &io::ErrorKind::AlreadyExists.into()));
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.map_or(Ok(()), |folder| match folder.metadata() {
        Ok(about) if about.is_dir() => Ok(()),
        Ok(_) => Err(failed(path, &io::ErrorKind::NotADirectory.into())),
        Err(error) => Err(failed(path, &error)),
    })
}

/// Writes the hostfile.
///
/// # Errors
/// [`CommandError`] if the file exists or can't be written.
pub fn save(path: &Path, text: &str) -> Result<(), CommandError> {
    let file = OpenOptions::new().write(true).create_new(true).open(path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|error| failed(path, &error))
}

fn failed(path: &Path, error: &io::Error) -> CommandError {
    let what = format!("can't write {}: {error}", path.display());
    match error.kind() {
        io::ErrorKind::AlreadyExists => {
            CommandError::usage(what).hint("give the name of a new file, or remove this one")
        }
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => CommandError::usage(what),
        _ => CommandError::failed(what),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_file_is_replaced() {
        let folder = std::env::temp_dir().join(format!("gwtest-hostfile-{}", std::process::id()));
        let path = folder.join("hosts");
        let no_folder = check(&path).unwrap_err();
        assert!(no_folder.code == 2 && no_folder.to_string().contains("can't write"));
        std::fs::create_dir(&folder).unwrap();
        check(&path).unwrap();
        save(&path, "a slots=1\n").unwrap();
        for error in [check(&path).unwrap_err(), save(&path, "b\n").unwrap_err()] {
            assert!(
                error.to_string().contains("hosts: entity already exists")
                    || error.to_string().contains("File exists"),
                "{error}"
            );
            assert_eq!(error.code, 2);
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a slots=1\n");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
