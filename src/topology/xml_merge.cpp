// SPDX-License-Identifier: Apache-2.0
#include "topology/xml_merge.h"

#include <algorithm>

namespace unisono::topology {

namespace {

constexpr std::string_view kHost = "host_hash";

// The attribute that tells elements of one name and parent apart; empty: there is only one.
std::string_view identityOf(std::string_view name) {
  if (name == "pci") return "busid";
  if (name == "net") return "name";
  if (name == "nvlink" || name == "pcilink") return "target";
  return {};
}

std::string attributeOf(const XmlNode& node, std::string_view attribute) {
  const std::string* value = node.find(attribute);
  return value ? *value : std::string();
}

bool sameElement(const XmlNode& a, const XmlNode& b);

// Adapters have no name of their own: they are the same if they share a port, or have none.
bool shareAPort(const XmlNode& a, const XmlNode& b) {
  if (a.children.empty() && b.children.empty()) return true;
  return std::any_of(a.children.begin(), a.children.end(), [&](const XmlNode& port) {
    return std::any_of(b.children.begin(), b.children.end(),
                       [&](const XmlNode& other) { return sameElement(port, other); });
  });
}

bool sameElement(const XmlNode& a, const XmlNode& b) {
  if (a.name != b.name) return false;
  if (a.name == "nic") return shareAPort(a, b);
  const std::string_view identity = identityOf(a.name);
  if (identity.empty()) return true;
  const std::string first = attributeOf(a, identity), second = attributeOf(b, identity);
  if (a.name == "net") {
    const std::string devA = attributeOf(a, "dev"), devB = attributeOf(b, "dev");
    return first == second && (devA.empty() || devB.empty() || devA == devB);
  }
  const BusId id = parseBusId(first);
  return id == kNoBusId ? first == second : id == parseBusId(second);
}

void fillAttributes(XmlNode& into, const XmlNode& from) {
  for (const XmlNode::Attribute& attribute : from.attributes) {
    const std::string* own = into.find(attribute.name);
    if (!own || own->empty()) into.set(attribute.name, attribute.value);
  }
}

XmlNode* findBelow(XmlNode& node, BusId busId) {
  for (XmlNode& child : node.children) {
    if (child.name != "pci") continue;
    if (parseBusId(attributeOf(child, "busid")) == busId) return &child;
    if (XmlNode* found = findBelow(child, busId)) return found;
  }
  return nullptr;
}

bool isOfHost(const XmlNode& cpu, const std::string& host) {
  const std::string own = attributeOf(cpu, kHost);
  return own.empty() || host.empty() || own == host;
}

class Merger {
 public:
  Merger(XmlNode& into, std::string host) : into_(into), host_(std::move(host)) {}

  void mergeCpu(const XmlNode& from) {
    const auto same = std::find_if(into_.children.begin(), into_.children.end(), [&](auto& cpu) {
      return cpu.name == "cpu" && isOfHost(cpu, host_) &&
             attributeOf(cpu, "numaid") == attributeOf(from, "numaid");
    });
    if (same != into_.children.end()) {
      fillAttributes(*same, from);
      mergeChildren(*same, from);
      return;
    }
    // A NUMA node that only `from` knows: needed if it brings devices that are new.
    XmlNode cpu;
    cpu.name = from.name;
    cpu.attributes = from.attributes;
    mergeChildren(cpu, from);
    if (!cpu.children.empty() || from.children.empty()) into_.children.push_back(std::move(cpu));
  }

 private:
  void mergeChildren(XmlNode& into, const XmlNode& from) {
    for (const XmlNode& child : from.children) {
      XmlNode* target = nullptr;
      if (child.name == "pci") target = findAnywhere(parseBusId(attributeOf(child, "busid")));
      if (!target) {
        const auto same = std::find_if(into.children.begin(), into.children.end(),
                                       [&](const XmlNode& own) { return sameElement(own, child); });
        if (same != into.children.end()) target = &*same;
        if (!target && child.name == "nic" && into.name == "pci") target = onlyNic(into);
      }
      if (target) {
        fillAttributes(*target, child);
        mergeChildren(*target, child);
        continue;
      }
      XmlNode added;
      added.name = child.name;
      added.attributes = child.attributes;
      added.line = child.line;
      mergeChildren(added, child);
      // A bridge whose devices all have their place elsewhere is not needed.
      const bool emptied = child.name == "pci" && added.children.empty() && !child.children.empty();
      if (!emptied) into.children.push_back(std::move(added));
    }
  }

  // A device holds one adapter, of which a platform's file may not name the ports.
  static XmlNode* onlyNic(XmlNode& pci) {
    XmlNode* only = nullptr;
    for (XmlNode& child : pci.children) {
      if (child.name != "nic") continue;
      if (only) return nullptr;
      only = &child;
    }
    return only;
  }

  XmlNode* findAnywhere(BusId busId) {
    for (XmlNode& cpu : into_.children) {
      if (cpu.name == "cpu" && isOfHost(cpu, host_)) {
        if (XmlNode* found = findBelow(cpu, busId)) return found;
      }
    }
    return nullptr;
  }

  XmlNode& into_;
  const std::string host_;
};

// Whether anything in the element is kept; removes what is not.
bool trim(XmlNode& node) {
  if (node.name == "gpu" || node.name == "net") {
    const bool kept = attributeOf(node, "keep") == "1";
    node.erase("keep");
    return kept;
  }
  bool kept = false;
  std::erase_if(node.children, [&](XmlNode& child) {
    if (child.name == "pcilink") return false;
    const bool keep = trim(child);
    kept |= keep;
    return !keep;
  });
  return kept;
}

}  // namespace

XmlNode* findDevice(XmlNode& system, uint64_t hostHash, BusId busId) {
  for (XmlNode& cpu : system.children) {
    const uint64_t own = XmlReader("topology").identifierOr(cpu, kHost, 0);
    if (hostHash != 0 && own != 0 && own != hostHash) continue;
    if (XmlNode* found = findBelow(cpu, busId)) return found;
  }
  return nullptr;
}

void mergeTopology(XmlNode& into, const XmlNode& from) {
  fillAttributes(into, from);
  std::string host;
  bool oneHost = true;
  for (const XmlNode& cpu : from.children) {
    const std::string own = attributeOf(cpu, kHost);
    oneHost = oneHost && (host.empty() || own == host);
    host = own;
    Merger(into, own).mergeCpu(cpu);
  }
  // What a platform's file says of no host is of this one.
  if (oneHost && !host.empty()) {
    for (XmlNode& cpu : into.children) {
      if (cpu.name == "cpu") cpu.setDefault(kHost, host);
    }
  }
}

void trimToKept(XmlNode& system) {
  trim(system);
}

}  // namespace unisono::topology
