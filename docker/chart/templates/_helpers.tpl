{{/* A model with what it leaves out: call with (dict "root" $ "model" .), read with fromYaml. */}}
{{- define "penstock.model" -}}
{{- $model := mergeOverwrite (deepCopy .root.Values.defaults) (deepCopy .model) -}}
{{- $_ := set $model "image" (mergeOverwrite (deepCopy .root.Values.image) $model.image) -}}
{{- toYaml $model -}}
{{- end -}}

{{- define "penstock.name" -}}
{{- printf "%s-%s" .root.Release.Name .model.name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "penstock.releaseLabels" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "penstock.selector" -}}
{{ include "penstock.releaseLabels" .root }}
app.kubernetes.io/component: {{ .model.name }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* A value as a variable holds it. Helm reads numbers as floats, whose text would be 6.4e+07. */}}
{{- define "penstock.text" -}}
{{- if kindIs "string" . -}}{{- . -}}{{- else -}}{{- toJson . -}}{{- end -}}
{{- end -}}

{{- define "penstock.keysSecret" -}}
{{- .Values.apiKeys.existingSecret | default (printf "%s-api-keys" .Release.Name) -}}
{{- end -}}

{{- define "penstock.hasKeys" -}}
{{- if or .Values.apiKeys.keys .Values.apiKeys.existingSecret -}}true{{- end -}}
{{- end -}}
